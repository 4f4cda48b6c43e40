"""How good the models of a run are: `judge.Judge` asks, the other modules measure and draw.

`evaluation.Evaluation` holds the scores; `result_tables` and `pictures` are also for reports.
"""
