#!/bin/bash
# A Slurm cluster of two nodes, n1 and n2, on this machine, with a GPU each that is none; to try configs/launch/slurm*.sh.
#
#   apt-get install slurm-wlm munge
#   eval "$(scripts/slurm_here.sh start /tmp/slurm_here)"    # sets SLURM_CONF; then sbatch, squeue and scontrol find it
#   scripts/slurm_here.sh stop /tmp/slurm_here
#
# Run it as root. Everything lies in the folder: configuration, key, state and logs. Outside it, `start` adds a line of
# n1 and n2 to /etc/hosts, which `stop` takes away. PORT is the first of four free ports in a row, 26817 unless set.
set -euo pipefail

verb=${1:-} folder=$(realpath -m "${2:-/tmp/slurm_here}")
case $verb in start | stop) ;; *) echo "usage: $0 start|stop [FOLDER]" >&2; exit 2 ;; esac
line="127.0.0.1 n1 n2 # slurm_here in $folder"

stop() {
  local file pid
  export SLURM_CONF=$folder/slurm.conf
  if [ -e "$folder/slurmctld.pid" ] && scancel --quiet --partition here 2> /dev/null; then
    for _ in {1..100}; do [ -n "$(squeue --noheader 2> /dev/null)" ] || break; sleep 0.1; done
  fi
  for file in "$folder"/{n1,n2,slurmctld,munged}.pid; do
    # A number of another process is left alone: the file may be an old one.
    [ -f "$file" ] && pid=$(< "$file") && grep -qzF "$folder" "/proc/$pid/cmdline" 2> /dev/null || continue
    kill "$pid"
    for _ in {1..100}; do kill -0 "$pid" 2> /dev/null || continue 2; sleep 0.1; done
    kill -KILL "$pid"
  done
  # In place: in a container /etc/hosts is a mount, and no file may take its place.
  if grep -qxF "$line" /etc/hosts; then
    local kept
    kept=$(grep -vxF "$line" /etc/hosts)
    printf '%s\n' "$kept" > /etc/hosts
  fi
}

if [ "$verb" = stop ]; then
  stop
  exit
fi

for program in slurmctld slurmd munged sbatch; do
  command -v "$program" > /dev/null || { echo "$program is missing: apt-get install slurm-wlm munge" >&2; exit 2; }
done
[ "$(id -u)" = 0 ] || { echo "run this as root: slurmd starts jobs, and /etc/hosts gets a line" >&2; exit 2; }
[ ! -e "$folder" ] || [ -e "$folder/slurm.conf" ] || { echo "$folder holds something else; name another folder" >&2; exit 2; }
stop
rm -rf "$folder"
mkdir -p "$folder"/{state,spool_n1,spool_n2}
chmod 755 "$folder"
head -c 1024 /dev/urandom > "$folder/munge.key"
chmod 600 "$folder/munge.key"
echo "$line" >> /etc/hosts

port=${PORT:-26817}
cat > "$folder/slurm.conf" << CONF
ClusterName=here
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmUser=root
SlurmctldPort=$port
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket
CredType=cred/munge
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool_%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/%n.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=5,bf_interval=5
GresTypes=gpu
NodeName=n1 NodeAddr=127.0.0.1 NodeHostname=$(hostname -s) Port=$((port + 1)) CPUs=2 Gres=gpu:1
NodeName=n2 NodeAddr=127.0.0.1 NodeHostname=$(hostname -s) Port=$((port + 2)) CPUs=2 Gres=gpu:1
PartitionName=here Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
CONF
cat > "$folder/gres.conf" << CONF
NodeName=n1 Name=gpu File=/dev/zero
NodeName=n2 Name=gpu File=/dev/full
CONF

fail() {
  echo "$1; the logs are in $folder" >&2
  tail -n 5 "$folder"/*.log >&2
  stop
  exit 1
}
munged --force --key-file "$folder/munge.key" --socket "$folder/munge.socket" --pid-file "$folder/munged.pid" \
  --seed-file "$folder/munge.seed" --log-file "$folder/munged.log" >&2 || fail "munged does not start"
slurmctld -f "$SLURM_CONF" >&2 || fail "slurmctld does not start"
for node in n1 n2; do slurmd -N "$node" -f "$SLURM_CONF" >&2 || fail "slurmd of $node does not start"; done
for _ in {1..60}; do
  [ "$(sinfo --noheader --states idle --format %D 2> /dev/null)" = 2 ] && break
  sleep 0.5
done
[ "$(sinfo --noheader --states idle --format %D)" = 2 ] || fail "the two nodes are not idle after 30 seconds"
echo "export SLURM_CONF=$SLURM_CONF"
