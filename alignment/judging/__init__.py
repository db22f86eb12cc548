"""Judges of two responses, and their questions and answers.

`responses` samples or reads what is judged. `judges` makes a judge of a `config` and asks it in both orders; its log is
`judgments`. Models judge in `language_judges`, by `likelihood` or behind a URL, people in `people_judge` and `labels`.
"""
