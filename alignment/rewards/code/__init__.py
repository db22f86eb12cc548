"""Python code as an answer that unit tests check.

Read unit_tests.py for the reward, then sandbox.py for the processes that it starts, then sandbox_program.py, which they
run: it shuts itself in and lets the tests call the answer.
"""
