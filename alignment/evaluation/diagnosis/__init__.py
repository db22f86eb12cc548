"""What went wrong in a training run, judged by its logs: one function per symptom, each with evidence and a setting to try."""
