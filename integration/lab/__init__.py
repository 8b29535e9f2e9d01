"""Research experiments, which are not part of the product. Each answers one question.

``python integration/lab/run.py`` lists the experiments.
"""
