"""Statistics of verdicts and scores, as pure functions: rates, ratings and agreement with their intervals.

`winrate` is the start: win rates, clusters, tests. `seeds` adds training runs, `corrected` people's labels beside a
judge's, `length_control` and `ratings` regressions of many outcomes, `agreement` judges beside people, `reward_card`
the figures of a reward model.
"""
