"""`alignment label`: who is answered, what each annotator is asked, that no answer is lost, and what is made of the answers."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest

from alignment.cli import main
from alignment.commands.label import argilla_record, label_studio_task, serve_labels, write_comparisons, write_export
from alignment.data.rows.read import read_rows
from alignment.data.rows.records import Prompt
from alignment.errors import UserError
from alignment.evaluation import file_judge
from alignment.files import hash_of
from alignment.judging import labeled_items
from alignment.judging.judgments import read_judgments
from alignment.judging.label_page import MOST_BYTES, LabelServer
from alignment.judging.labeled_items import Items, LabelColumns
from alignment.judging.labels import LabelSession, agreement_lines, questions, read_questions
from alignment.training.run.directory import lock
from tests.conftest import lines_file, read_lines
from tests.killing import run_killed

CHROMIUM = "/usr/bin/chromium"


def form_rows(count: int) -> list[dict]:
    """A form; of each pair the response "good N" is the better one."""
    sides = [("good", "bad"), ("bad", "good")]
    return [
        {"id": f"row-{i}", "prompt": f"Question {i}?", "first": f"{first} {i}", "second": f"{second} {i}",
         "first_model": f"{first}-model", "second_model": f"{second}-model", "verdict": None}
        for i in range(count) for first, second in [sides[i % 2]]
    ]  # fmt: skip


@pytest.fixture
def form(tmp_path) -> Path:
    return lines_file(tmp_path / "form.jsonl", form_rows(20))


def session_on(file: Path, output: Path, **changes) -> LabelSession:
    settings = {"seed": 0, "repeats": 0.1, "ratings": False, "flags": ("harmful", "untrue")}
    return LabelSession(read_questions(str(file)), output, **{**settings, **changes})


@contextmanager
def served(session: LabelSession, annotator: str | None = None):
    with LabelServer(0, {"/show": session.show, "/answer": session.answer}, annotator) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()


def call(
    port: int, method: str, path: str, body: object = None, **headers: str | None
) -> tuple[int, str, dict[str, str]]:
    """Status, text and headers of a request; a header's underscores are dashes, and None leaves it out."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    sent = {"Host": f"127.0.0.1:{port}", "Content-Type": "application/json", "Content-Length": str(len(content))}
    sent |= {name.replace("_", "-"): value for name, value in headers.items()}
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    for name, value in sent.items():
        if value is not None:
            connection.putheader(name, value)
    connection.endheaders(content)
    answer = connection.getresponse()
    found = answer.status, answer.read().decode(), {name.lower(): value for name, value in answer.getheaders()}
    connection.close()
    return found


def ask(server: LabelServer, path: str, status: int = 200, **body: object) -> dict:
    found, text, _ = call(server.server_port, "POST", path, body, Authorization=f"Bearer {server.token}")
    assert found == status, text
    return json.loads(text)


def prefer(found: dict, better: str = "good") -> dict:
    """The answer to a pair that prefers the response which begins so."""
    ranks = [0 if text.startswith(better) else 1 for text in found["responses"]]
    return {"number": found["number"], "ranks": ranks, "seconds": 2.0}


def label_all(session: LabelSession, annotator: str, choose=prefer) -> list[dict]:
    """Answer every open question; the questions as they were shown."""
    shown, found = [], session.show({"annotator": annotator})
    while "report" not in found:
        shown.append(found)
        found = session.answer({"annotator": annotator, **choose(found)})
    return shown


@contextmanager
def started(form: Path, output: Path, *options: str):
    """The address that the command prints, in a process of its own, and the process."""
    command = [sys.executable, "-m", "alignment", "label", str(form), "--output", str(output), *options]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment
    ) as process:
        try:
            assert process.stderr is not None
            yield next(line.strip() for line in process.stderr if line.startswith("http://127.0.0.1:")), process
        finally:
            process.kill()


# Who is answered


def test_only_the_page_with_the_token_is_answered(form, tmp_path):
    with served(session_on(form, tmp_path / "labels.jsonl")) as server:
        port, token = server.server_port, server.token
        own, bearer = f"/?token={token}", {"Authorization": f"Bearer {token}"}
        body = {"annotator": "ann"}

        def statuses(**headers: str | None) -> tuple[int, int]:
            return call(port, "GET", own, **headers)[0], call(port, "POST", "/show", body, **bearer | headers)[0]

        assert server.server_address[0] == "127.0.0.1"
        assert statuses() == (200, 200)
        assert statuses(Host=f"localhost:{port}") == (200, 200)
        assert statuses(Origin=f"http://127.0.0.1:{port}", Sec_Fetch_Site="same-origin") == (200, 200)
        assert statuses(Host="localhost:9000") == (200, 200)  # through a tunnel
        for host in ("evil.example", f"evil.example:{port}", "", None, "127.0.0.1.evil.example:80", "localhost.evil:1"):
            assert statuses(Host=host) == (403, 403), host
        for origin in ("null", "http://evil.example", f"https://127.0.0.1:{port}", "http://127.0.0.1:1"):
            assert statuses(Origin=origin) == (403, 403), origin
        assert statuses(Sec_Fetch_Site="cross-site") == statuses(Sec_Fetch_Site="same-site") == (403, 403)
        for wrong in ("", token[:-1], token + "x", "\u00e9"):
            assert call(port, "GET", f"/?token={wrong}".encode("ascii", "ignore").decode())[0] == 403
            assert call(port, "POST", "/show", body, Authorization=f"Bearer {wrong}")[0] == 403
        assert call(port, "POST", f"/show?token={token}", body)[0] == 403  # a form of another page could send that
        assert call(port, "GET", "/")[0] == call(port, "POST", "/show", body)[0] == 403
        assert call(port, "GET", f"/../labels.jsonl?token={token}")[0] == 404
        assert call(port, "POST", "/other", body, **bearer)[0] == 404
        assert call(port, "PUT", own)[0] == call(port, "OPTIONS", own)[0] == call(port, "HEAD", own)[0] == 501
        texts = [call(port, "GET", path)[1] for path in ("/", "/labels.jsonl", "/?token=x")]
        assert not [text for text in texts if "Question" in text or token in text]


def test_a_new_start_has_a_new_token_and_a_taken_port_is_told(form, tmp_path):
    session = session_on(form, tmp_path / "labels.jsonl")
    with served(session) as one, served(session) as other:
        assert one.token != other.token and len(one.token) >= 43
        assert call(other.server_port, "GET", f"/?token={one.token}")[0] == 403
        with pytest.raises(UserError, match=f"--port {one.server_port}: .*--port 0 takes a free port"):
            LabelServer(one.server_port, {}, None)


def test_the_page_is_one_file_that_runs_and_loads_nothing_else(form, tmp_path):
    with served(session_on(form, tmp_path / "labels.jsonl"), "Ann <b>") as server:
        pages = [call(server.server_port, "GET", f"/?token={server.token}") for _ in range(2)]
    nonces = [re.findall(r'nonce="([\w-]+)"', text) for _, text, _ in pages]
    assert len(set(nonces[0])) == 1 and len(nonces[0]) == 2 and nonces[0] != nonces[1]
    policy = pages[0][2]["content-security-policy"]
    assert "default-src 'none'" in policy and f"script-src 'nonce-{nonces[0][0]}'" in policy and "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy and "form-action 'none'" in policy
    assert pages[0][2]["referrer-policy"] == "no-referrer" and pages[0][2]["cache-control"] == "no-store"
    page = pages[0][1]
    assert not re.search(r"https?://|//[a-z]+\.", page.split("<body")[0]) and 'data-annotator="Ann &lt;b&gt;"' in page
    assert "Question" not in page and "model" not in page and server.token not in page


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b"no json", {}, 400),
        (b"[1]", {}, 400),
        (b"{}", {"Content_Type": "text/plain"}, 415),  # what a form of another page can send
        (b"{}", {"Content_Length": None}, 415),
        (b"{}", {"Content_Length": "-1"}, 415),
        (b"{}", {"Content_Length": str(MOST_BYTES + 1)}, 415),
        (b"[" * 50_000, {}, 400),
        ({"annotator": " "}, {}, 400),
        ({"annotator": "a\nb"}, {}, 400),
        ({"annotator": "a" * 61}, {}, 400),
        ({"annotator": "ann", "number": 99}, {}, 400),
        ({"annotator": "ann", "number": "1"}, {}, 400),
    ],
)
def test_a_wrong_body_is_refused_in_words(form, tmp_path, body, headers, status):
    with served(session_on(form, tmp_path / "labels.jsonl")) as server:
        bearer = {"Authorization": f"Bearer {server.token}", **headers}
        found, text, _ = call(server.server_port, "POST", "/show", body, **bearer)
        assert (found, list(json.loads(text))) == (status, ["error"])
        assert ask(server, "/show", annotator="ann")["number"] == 0


@pytest.mark.parametrize("number", [-1, 11, True, 0.0, "1", None])
def test_a_number_that_no_question_has_is_refused_in_words(form, tmp_path, number):
    """[B-L7] The last question is not number -1."""
    session = session_on(form, tmp_path / "labels.jsonl")
    total = session.show({"annotator": "ann"})["total"]
    for request in (session.show, session.answer):
        with pytest.raises(UserError, match="number"):
            request({"annotator": "ann", "number": total + 1 if number == 11 else number, "ranks": [0, 1]})
    with pytest.raises(UserError, match="number"):
        session.answer({"annotator": "ann", "number": total, "ranks": [0, 1]})


def test_a_second_page_on_a_file_is_refused(form, tmp_path):
    """[E8] Each would take back the changes of the other."""
    session = session_on(form, tmp_path / "labels.jsonl")
    with lock(tmp_path, "labels.jsonl"), pytest.raises(UserError, match=r"labels\.jsonl is in use"):
        serve_labels(session, None, 0)
    with lock(tmp_path, "others.jsonl"), pytest.raises(UserError, match="port"):
        serve_labels(session, None, 70000)


@pytest.mark.parametrize(
    "answer",
    [
        {}, {"ranks": []}, {"ranks": [0]}, {"ranks": [0, 2]}, {"ranks": [1, 1]}, {"ranks": [0, 1, 1]}, {"ranks": [0, -1]},
        {"ranks": "01"}, {"ranks": [0, 1], "ratings": [1, 2]}, {"ranks": [0, 1], "flags": [["rude"], []]},
        {"ranks": [0, 1], "flags": [[]]}, {"ranks": [0, 1], "seconds": -1}, {"ranks": [0, 1], "comment": 3},
    ],
)  # fmt: skip
def test_an_answer_that_is_not_whole_is_refused_and_not_kept(form, tmp_path, answer):
    session = session_on(form, tmp_path / "labels.jsonl")
    with pytest.raises((UserError, KeyError)):
        session.answer({"annotator": "ann", "number": 0, **answer})
    assert not session.labels and not (tmp_path / "labels.jsonl").exists()


# What is asked


def test_a_question_shows_no_models(form, tmp_path):
    found = session_on(form, tmp_path / "labels.jsonl").show({"annotator": "ann"})
    assert "model" not in json.dumps(found) and "row-" not in json.dumps(found)


def test_a_published_pair_is_one_question_of_two_responses(tmp_path):
    row = {"prompt": "p", "response_0": "a", "response_1": "b", "better_response_id": 1}
    [item] = read_questions(str(lines_file(tmp_path / "pairs.jsonl", [row])))
    assert sorted(item.responses) == ["a", "b"]


def test_each_annotator_has_an_order_of_their_own_that_the_file_does_not_change(tmp_path):
    rows = form_rows(200)
    turned = [{**row, "first": row["second"], "second": row["first"]} for row in rows[::-1]]
    items, others = (
        read_questions(str(lines_file(tmp_path / f"{name}.jsonl", own))) for name, own in (("a", rows), ("b", turned))
    )
    ann, bo = questions(items, "ann", 0, 0.1), questions(items, "bo", 0, 0.1)
    same = questions(others, "ann", 0, 0.1)
    assert [(each.id, each.responses, each.repeat) for each in ann] == [(e.id, e.responses, e.repeat) for e in same]
    ids = [[each.id for each in asked if not each.repeat] for asked in (ann, bo, questions(items, "ann", 1, 0.1))]
    assert len(set(map(tuple, ids))) == 3 and {frozenset(own) for own in ids} == {frozenset(row["id"] for row in rows)}
    first = sum(each.responses[0].startswith("good") for each in ann if not each.repeat)
    assert 75 <= first <= 125  # of 200 fair coins: 3.5 standard deviations
    for each in ann:
        assert each.models == tuple(f"{text.split()[0]}-model" for text in each.responses)


def test_hidden_repeats_come_later_with_their_sides_exchanged(tmp_path):
    items = read_questions(str(lines_file(tmp_path / "form.jsonl", form_rows(60))))
    asked = questions(items, "ann", 0, 0.1)
    again = [each for each in asked if each.repeat]
    assert len(asked) == 66 and len(again) == 6 and [each.position for each in asked] == list(range(66))
    for each in again:
        [first] = [other for other in asked if other.id == each.id and not other.repeat]
        assert first.responses == each.responses[::-1] and first.models == each.models[::-1]
        assert first.position < 20 and each.position >= 30
    assert not any(each.repeat for each in questions(items, "ann", 0, 0.0))


def test_a_pair_in_both_orders_is_asked_once(tmp_path, capsys):
    rows = [*form_rows(2), {"prompt": "No id?", "first": "good 9", "second": "bad 9"}]
    both = [*rows, *({**row, "first": row["second"], "second": row["first"]} for row in rows)]
    assert len(read_questions(str(lines_file(tmp_path / "form.jsonl", both)))) == 3
    assert "3 questions in 6 rows" in capsys.readouterr().err


MESSAGES = [{"role": "user", "content": "Hello?"}]


@pytest.mark.parametrize(
    ("row", "responses", "models"),
    [
        ({"id": "a", "prompt": "P", "responses": {"base": "x", "dpo": "y"}, "ended": {}}, ("x", "y"), ("base", "dpo")),
        ({"prompt": "P", "responses": ["x", "", "z"]}, ("x", "", "z"), ()),
        ({"prompt": MESSAGES, "responses": ["x", "y"], "models": ["m", "n"]}, ("x", "y"), ("m", "n")),
        ({"prompt": "P", "chosen": "x", "rejected": "y"}, ("x", "y"), ()),
        ({"chosen": "\n\nHuman: P\n\nAssistant: x", "rejected": "\n\nHuman: P\n\nAssistant: y"}, (" x", " y"), ()),
        ({"prompt": "P", "responses": ["x", "y", "z"], "ranking": [2, 0, 1]}, ("x", "y", "z"), ()),
        ({"prompt": "P", "completion": "x"}, ("x",), ()),
    ],
)
def test_rows_that_can_be_labeled(tmp_path, row, responses, models):
    [item] = read_questions(str(lines_file(tmp_path / "rows.jsonl", [row])))
    assert (item.responses, item.models, item.judge, item.ranks) == (responses, models, "", ())
    [same] = read_questions(str(lines_file(tmp_path / "other.jsonl", [row])))
    assert same.key == item.key


def test_all_rows_that_cannot_be_labeled_are_named(tmp_path):
    rows = [
        {"prompt": "P", "first": "x"},
        {"first": "x", "second": "y"},
        {"prompt": "P", "responses": list("abcdefghij")},
    ]
    path = lines_file(tmp_path / "form.jsonl", [*form_rows(1), *rows])
    with pytest.raises(UserError) as error:
        read_questions(str(path))
    assert [line.split(": ")[0] for line in str(error.value).splitlines()] == [f"{path}:{n}" for n in (2, 3, 4)]


# What is kept


def test_answers_become_judgment_rows(form, tmp_path):
    output = tmp_path / "new" / "labels.jsonl"
    session = session_on(form, output)
    found = session.show({"annotator": " ann "})
    answer = {**prefer(found), "flags": [["untrue"], []], "comment": "hm", "seconds": 3.25}
    session.answer({"annotator": "ann", **answer})
    [row] = read_lines(output)
    good = found["responses"][0].startswith("good")
    first, second = ("good", "bad") if good else ("bad", "good")
    assert row["verdict"] == (1 if good else 0) and (row["first"], row["second"]) == found["responses"]
    assert (row["first_model"], row["second_model"]) == (f"{first}-model", f"{second}-model")
    assert (row["judge"], row["position"], row["seconds"], row["comment"]) == ("ann", 0, 3.25, "hm")
    assert row["flags"] == [["untrue"], []] and "ranks" not in row and "repeat" not in row
    [judgment] = read_judgments(output)
    assert (judgment.verdict, judgment.judge, judgment.first_model) == (row["verdict"], "ann", f"{first}-model")


def test_every_pair_is_asked_once_per_person_and_a_changed_mind_counts(form, tmp_path):
    output = tmp_path / "labels.jsonl"
    session = session_on(form, output)
    for name in ("ann", "bo"):
        shown = label_all(session, name)
        assert len(shown) == 22 and [each["number"] for each in shown] == list(range(22))
        texts = Counter(frozenset(each["responses"]) for each in shown)
        assert len(texts) == 20 and sorted(texts.values())[-3:] == [1, 2, 2]
    earlier = session.show({"annotator": "ann", "number": 4})
    assert earlier["earlier"]["ranks"] == tuple(prefer(earlier)["ranks"])
    session.answer({"annotator": "ann", **prefer(earlier, "bad")})
    assert len(output.read_text().splitlines()) == 44  # it took the place of the first one
    again = session_on(form, output)
    assert len(again.labels) == 44
    assert again.show({"annotator": "ann", "number": 4})["earlier"]["ranks"] == tuple(prefer(earlier, "bad")["ranks"])
    assert "report" in again.show({"annotator": "ann"})


@pytest.mark.parametrize("after", [0, 7, 21])
def test_killed_in_the_middle_it_goes_on_where_it_was(form, tmp_path, capsys, after):
    output = tmp_path / "labels.jsonl"
    before = questions(read_questions(str(form)), "ann", 0, 0.1)
    killed = run_killed(lambda: label_all(session_on(form, output), "ann"), after, ["fsync"])  # one for each answer
    assert killed == -signal.SIGKILL
    whole = output.read_text()
    assert len(whole.splitlines()) == after + 1  # the last one is in the file, and the page had not gone on
    output.write_text(whole + whole.splitlines()[0][:-9])  # as if killed while it wrote the next one
    session = session_on(form, output)
    assert output.read_text() == whole and "torn" in capsys.readouterr().err
    rest = label_all(session, "ann")
    assert [each["responses"] for each in rest] == [each.responses for each in before[after + 1 :]]
    assert len(read_judgments(output)) == len(session.labels) == 22


def test_the_command_prints_the_address_and_ends_with_the_report(form, tmp_path, monkeypatch, capsys):
    def pressed(server: LabelServer) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LabelServer, "serve_forever", pressed)
    assert main(["label", str(form), "--output", str(tmp_path / "labels.jsonl"), "--annotator", "ann"]) == 0
    found = capsys.readouterr()
    assert re.search(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{43}\n", found.err) and found.out == "no labels yet\n"
    assert main(["label", str(form), "--annotator", "a" * 61]) == 2
    assert main(["label", str(form), "--port", "70000"]) == 2
    assert main(["label", str(tmp_path / "none.jsonl")]) == 2


def test_answers_of_many_at_once_are_all_kept(form, tmp_path):
    output = tmp_path / "labels.jsonl"
    session = session_on(form, output, repeats=0.0)
    threads = [threading.Thread(target=label_all, args=(session, f"ann-{i}")) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Counter(row.judge for row in read_judgments(output)) == {f"ann-{i}": 20 for i in range(4)}


def test_a_full_disk_loses_no_answer(form, tmp_path, monkeypatch):
    output = tmp_path / "labels.jsonl"
    session = session_on(form, output)
    with served(session) as server:
        found = ask(server, "/show", annotator="ann")
        with monkeypatch.context() as patch:
            patch.setattr("alignment.judging.labels.sync", lambda path: (_ for _ in ()).throw(OSError(5, "no disk")))
            assert "no disk" in ask(server, "/answer", 500, annotator="ann", **prefer(found))["error"]
        assert ask(server, "/show", annotator="ann")["number"] == 0  # it does not go on
        assert ask(server, "/answer", annotator="ann", **prefer(found))["number"] == 1
    assert len(session_on(form, output).labels) == 1


def test_labels_of_other_questions_are_counted_and_left_alone(form, tmp_path, capsys):
    output = tmp_path / "labels.jsonl"
    label_all(session_on(form, output), "ann")
    others = [{**row, "prompt": "Else?", "id": f"else-{row['id']}"} for row in form_rows(5)]
    other = lines_file(tmp_path / "other.jsonl", others)
    before = output.read_text()
    label_all(session_on(other, output), "ann")
    assert "22 labels are of other questions" in capsys.readouterr().err
    assert output.read_text().startswith(before) and len(session_on(form, output).labels) == 22


@pytest.mark.parametrize(
    "change", [{"verdict": None}, {"verdict": 2}, {"verdict": "1"}, {"seconds": -1}, {"position": "x"}]
)
def test_a_label_that_cannot_be_read_is_named(form, tmp_path, change):
    output = tmp_path / "labels.jsonl"
    label_all(session_on(form, output), "ann")
    rows = read_lines(output)
    lines_file(output, [*rows[:3], {**rows[3], **change}])
    with pytest.raises(UserError, match=rf"labels.jsonl:4: (\[3\]\.)?{next(iter(change))}"):
        session_on(form, output)


# What is made of it


def contrary(found: dict) -> dict:
    """As `prefer`, but a tie on rows 0 to 2, the other way round on 3, and always the first one on rows 4 and 5."""
    number = int(found["responses"][0].split()[1])
    ranks = [0, 0] if number < 3 else prefer(found, "bad")["ranks"] if number == 3 else prefer(found)["ranks"]
    return {"number": found["number"], "ranks": [0, 1] if number in (4, 5) else ranks, "seconds": 4.0}


def hand_kappa(rows: list[dict], one: str, other: str) -> float:
    """(observed - chance) / (1 - chance), verdicts being for that text of each pair whose hash is smaller."""
    tables: dict[str, dict[str, float]] = {one: {}, other: {}}
    for row in rows:
        turned = hash_of(row["first"]) > hash_of(row["second"])
        if not row.get("repeat"):
            tables[row["judge"]][row["id"]] = 1 - row["verdict"] if turned else row["verdict"]
    pairs = [(verdict, tables[other][name]) for name, verdict in tables[one].items()]
    observed = sum(a == b for a, b in pairs) / len(pairs)
    shares = [Counter(side) for side in zip(*pairs, strict=True)]
    chance = sum(shares[0][verdict] * shares[1][verdict] for verdict in (0, 0.5, 1)) / len(pairs) ** 2
    return (observed - chance) / (1 - chance)


def test_agreement_is_that_of_a_hand_count(form, tmp_path, capsys):
    output = tmp_path / "labels.jsonl"
    session = session_on(form, output)
    label_all(session, "ann")
    label_all(session, "bo", contrary)
    rows = read_lines(output)
    good = {}  # for the good response, by person and row
    for row in rows:
        verdict = row["verdict"] if row["first"].startswith("good") else 1 - row["verdict"]
        good[row["judge"], row["id"], row.get("repeat", False)] = verdict
    alike = sum(good["ann", f"row-{i}", False] == good["bo", f"row-{i}", False] for i in range(20))
    assert 14 <= alike <= 16  # all but rows 0 to 3, and those of 4 and 5 whose bad response bo saw first
    repeated = [name for judge, name, again in good if again and judge == "bo"]
    same = sum(good["bo", name, True] == good["bo", name, False] for name in repeated)
    first, second, both = agreement_lines(session.labels.values())
    assert first.startswith("ann: 22 answers, 2.0 s each (median); 2 of 2 repeats judged alike (100%")
    assert second.startswith(f"bo: 22 answers, 4.0 s each (median); {same} of 2 repeats judged alike")
    assert both.startswith(f"ann and bo; {alike} of 20 pairs judged alike ({alike / 20:.0%}, kappa ")
    assert f"kappa {hand_kappa(rows, 'ann', 'bo'):.2f})" in both
    capsys.readouterr()
    assert main(["label", str(form), "--output", str(output), "--report"]) == 0
    assert capsys.readouterr().out.splitlines() == [first, second, both]


def test_comparisons_are_what_reward_models_read(form, tmp_path):
    output, rows = tmp_path / "labels.jsonl", tmp_path / "comparisons.jsonl"
    session = session_on(form, output)
    label_all(session, "ann")
    tie = {"ranks": [0, 0]}
    label_all(session, "bo", lambda found: prefer(found) | (tie if "bad 0" in found["responses"] else {}))
    ties = [label for label in session.labels.values() if label.ranks == (0, 0) and not label.repeat]
    assert len(ties) == 1
    assert write_comparisons(rows, session.labels.values()) == f"{rows}: 39 rows; 5 ties and repeats are left out"
    records, tally = read_rows(rows, "comparisons")
    assert tally.kept == 39 and not tally.lost
    assert all(each.chosen.startswith("good") and each.rejected.startswith("bad") for each in records)
    assert {each.prompt for each in records} == {f"Question {i}?" for i in range(20)}


def test_win_rates_and_evaluations_of_judges_read_the_labels(form, tmp_path):
    output = tmp_path / "labels.jsonl"
    session = session_on(form, output)
    for name, better in (("ann", "good"), ("bo", "good"), ("cy", "bad")):
        label_all(session, name, lambda found, better=better: prefer(found, better))
    prompts = [Prompt(f"Question {i}?", {}, f"row-{i}") for i in range(20)]
    goods, bads = ([f"{side} {i}" for i in range(20)] for side in ("good", "bad"))
    judge = file_judge(output)
    assert judge(prompts, goods, bads) == [1.0] * 20 and judge(prompts, bads, goods) == [0.0] * 20
    items: Items = {}
    labeled_items.add_items(str(output), LabelColumns(), items)
    for item in items.values():
        good = float(item.first.startswith("good"))
        assert item.votes == {"ann": good, "bo": good, "cy": 1 - good}
    assert len(items) == 20


def test_rankings_ratings_and_ties_of_more_responses(tmp_path):
    file = [{"prompt": MESSAGES, "responses": {"m": "one", "n": "two", "o": "three"}}]
    output, rows = tmp_path / "labels.jsonl", tmp_path / "comparisons.jsonl"
    session = session_on(lines_file(tmp_path / "k.jsonl", file), output, ratings=True)
    found = session.show({"annotator": "ann"})
    assert found["likert"] == 7 and sorted(found["responses"]) == ["one", "three", "two"]
    places, points = {"two": 0, "one": 1, "three": 1}, {"two": 7, "one": 3, "three": 1}
    answer = {"ranks": [places[text] for text in found["responses"]]}
    answer["ratings"] = [points[text] for text in found["responses"]]
    with pytest.raises(UserError, match="not whole"):
        session.answer({"annotator": "ann", "number": 0, "ranks": answer["ranks"]})
    session.answer({"annotator": "ann", "number": 0, **answer})
    [label] = session_on(tmp_path / "k.jsonl", output).labels.values()
    assert dict(zip(label.responses, label.ratings, strict=True)) == points
    assert dict(zip(label.responses, label.models, strict=True)) == {"one": "m", "two": "n", "three": "o"}
    assert write_comparisons(rows, [label]) == f"{rows}: 1 rows; 0 ties and repeats are left out"
    task = label_studio_task([label])
    assert task["data"]["prompt"] == argilla_record([label])["fields"]["prompt"] == MESSAGES
    results = [each for each in task["annotations"][0]["result"] if each["type"] == "number"]
    ranks = {each["to_name"]: each["value"]["number"] for each in results}
    assert [ranks[f"response_{n}"] - 1 for n in (1, 2, 3)] == answer["ranks"]
    with pytest.raises(UserError, match=r"labels.jsonl:1: no 'first', 'second', 'verdict'.*leave such rows out"):
        file_judge(output)
    [ranking], _ = read_rows(rows, "rankings")
    assert dict(zip(ranking.responses, ranking.ranks, strict=True)) == places
    pairs, _ = read_rows(rows, "comparisons")
    assert sorted((each.chosen, each.rejected) for each in pairs) == [("two", "one"), ("two", "three")]


def test_a_response_alone_is_rated(tmp_path):
    file = lines_file(tmp_path / "one.jsonl", [{"prompt": "P", "completion": "x"}])
    session = session_on(file, tmp_path / "labels.jsonl")
    with pytest.raises(UserError, match="not whole"):
        session.answer({"annotator": "ann", "number": 0, "ranks": [0]})
    assert "report" in session.answer({"annotator": "ann", "number": 0, "ranks": [0], "ratings": [6]})
    [row] = read_lines(tmp_path / "labels.jsonl")
    assert (row["responses"], row["ratings"]) == (["x"], [6])
    assert [label.ratings for label in session_on(file, tmp_path / "labels.jsonl").labels.values()] == [(6,)]


def test_exports_for_argilla_and_label_studio(form, tmp_path):
    output = tmp_path / "labels.jsonl"
    session = session_on(form, output, ratings=True)
    for name in ("ann", "bo"):
        label_all(session, name, lambda found: {
            **prefer(found), "ratings": [7 if text.startswith("good") else 2 for text in found["responses"]],
            "flags": [["untrue"] if text.startswith("bad") else [] for text in found["responses"]], "comment": "so",
        })  # fmt: skip
    files = ["--argilla", str(tmp_path / "argilla.json"), "--label-studio", str(tmp_path / "label-studio.json")]
    assert main(["label", str(form), "--output", str(output), *files]) == 0
    records = json.loads((tmp_path / "argilla.json").read_text())
    assert len(records) == 20
    record = next(record for record in records if record["fields"]["prompt"] == "Question 3?")
    assert record["fields"] == {"prompt": "Question 3?", "response_1": "bad 3", "response_2": "good 3"}
    assert record["suggestions"] == {} and len(record["id"]) == 64
    values = {name: [given["value"] for given in answers] for name, answers in record["responses"].items()}
    assert values == {
        "comment": ["so", "so"], "preference": ["response_2"] * 2, "rating_1": [2, 2], "rating_2": [7, 7],
        "flags_1": [["untrue"], ["untrue"]],
    }  # fmt: skip
    users = [given["user_id"] for given in record["responses"]["preference"]]
    assert len(set(users)) == 2 and all(given["status"] == "submitted" for given in record["responses"]["preference"])
    tasks = json.loads((tmp_path / "label-studio.json").read_text())
    task = next(task for task in tasks if task["data"]["id"] == "row-3")
    assert task["data"]["response_2"] == "good 3" and task["data"]["annotators"] == ["ann", "bo"]
    assert [each["lead_time"] for each in task["annotations"]] == [2.0, 2.0]
    results = task["annotations"][0]["result"]
    assert {each["from_name"]: (each["to_name"], each["type"], each["value"]) for each in results} == {
        "comment": ("prompt", "textarea", {"text": ["so"]}),
        "preference": ("prompt", "choices", {"choices": ["response_2"]}),
        "rating_1": ("response_1", "rating", {"rating": 2}),
        "rating_2": ("response_2", "rating", {"rating": 7}),
        "flags_1": ("response_1", "choices", {"choices": ["untrue"]}),
    }
    write_export(tmp_path / "k.json", [], label_studio_task)
    assert json.loads((tmp_path / "k.json").read_text()) == []


# In a browser


def until(page, condition) -> None:
    """Wait for something; the page's own policy forbids to have it evaluate a condition."""
    for _ in range(1000):
        if condition():
            return
        page.wait_for_timeout(10)
    raise AssertionError("what was waited for did not come")


@pytest.mark.slow
def test_two_annotators_label_in_a_browser_by_keyboard_and_a_reward_model_learns_it(
    form, tmp_path, write_checkpoint, capsys
):
    api = pytest.importorskip("playwright.sync_api")
    if not Path(CHROMIUM).exists():
        pytest.skip(f"no {CHROMIUM}")
    output = tmp_path / "labels.jsonl"
    given: dict[tuple[str, frozenset[str], bool], float] = {}
    times: Counter = Counter()

    def label(page, name: str, count: int) -> None:
        """Answer `count` questions by keys: ann prefers the good one, bo too but for row 0 (tie) and row 1 (the bad one)."""
        for _ in range(count):
            texts = page.locator("article .text").all_inner_texts()
            number, better = int(texts[0].split()[1]), "bad" if name == "bo" and texts[0].endswith(" 1") else "good"
            tie = name == "bo" and number == 0
            keys = ("1", "ArrowLeft") if texts[0].startswith(better) else ("2", "ArrowRight")
            key = "0" if tie else keys[number % 2]
            place = page.inner_text("#place")
            page.keyboard.press(key)
            page.keyboard.press("Enter")
            until(page, lambda place=place: page.inner_text("#place") != place)
            pair = frozenset(texts)
            times[name, pair] += 1
            good = texts[0].startswith("good")
            given[name, pair, times[name, pair] == 2] = 0.5 if tie else float(better == "good")
            assert good or texts[0].startswith("bad")

    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 400, "height": 800})
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text))
        with started(form, output) as (url, process):
            page.goto(url)
            page.keyboard.type("ann")
            page.keyboard.press("Enter")
            page.wait_for_selector("article")
            assert page.evaluate("document.documentElement.scrollWidth") == 400  # nothing sticks out on a phone
            label(page, "ann", 9)
            page.keyboard.press("2")
            process.send_signal(signal.SIGKILL)
            process.wait()
            page.keyboard.press("Enter")
            until(page, lambda: "Not saved" in page.inner_text("#question .status"))
        assert len(output.read_text().splitlines()) == 9 and not [each for each in problems if "ERR_" not in each]
        problems.clear()
        with started(form, output, "--annotator", "ann") as (url, _):
            page.goto(url)
            page.wait_for_selector("article")
            assert page.inner_text("#place") == "ann · 9 of 22 answered"
            page.keyboard.press("Backspace")  # back, another answer, and forward again
            page.wait_for_selector("#question .pick[aria-pressed=true]")
            page.keyboard.press("c")
            page.keyboard.type("seen again")
            page.keyboard.press("Escape")
            page.keyboard.press("Enter")
            until(page, lambda: page.locator("#verdict [aria-pressed=true]").count() == 0)
            label(page, "ann", 13)
            page.wait_for_selector("#done:not([hidden])")
        with started(form, output, "--annotator", "bo") as (url, _):
            page.goto(url)
            page.wait_for_selector("article")
            label(page, "bo", 22)
            page.wait_for_selector("#done:not([hidden])")
            shown = page.inner_text("#report").splitlines()
        browser.close()
    assert not problems
    labels = session_on(form, output).labels
    assert len(labels) == len(output.read_text().splitlines()) == 44
    assert [label.comment for label in labels.values() if label.comment] == ["seen again"]
    pairs = {pair for name, pair, again in given if not again}
    alike = sum(given["ann", pair, False] == given["bo", pair, False] for pair in pairs)
    kappa = hand_kappa([label.row() for label in labels.values()], "ann", "bo")
    assert len(pairs) == 20 and alike == 18
    assert f"ann and bo; 18 of 20 pairs judged alike (90%, kappa {kappa:.2f})" in shown

    comparisons = tmp_path / "comparisons.jsonl"
    assert main(["label", str(form), "--output", str(output), "--comparisons", str(comparisons)]) == 0
    assert f"{comparisons}: 39 rows; 5 ties and repeats are left out" in capsys.readouterr().out
    policy, run = write_checkpoint(tmp_path / "policy", "llama"), tmp_path / "reward"
    settings = [f"policy={policy}", f"data.train={comparisons}", f"output={run}", "data.evaluation=null"]
    settings += ["training.max_steps=30", "training.batch_size=8"]
    assert main(["reward", "reward/tiny", *settings]) == 0
    lines = read_lines(run / "metrics.jsonl")
    assert lines[-1]["accuracy"] >= 0.8
