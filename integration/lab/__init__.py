"""Research, not product: experiments that answer one question each, and their results.

``python integration/lab/run.py`` lists the experiments.
"""
