"""Command line of the lab: the name of an experiment, then its options."""

from benchmarks.__main__ import Experiments

EXPERIMENTS = {
    "schedule": "length of a step with offload in virtual time",
    "practicality": "steps without offload over steps with it, in virtual time; peers' schedules",
    "late": "random delays on an accelerator made of threads; results must be the CPU's",
    "plan": "predicted time and memory of 24 configurations, and the choice against a search",
    "seq2seq": "a T5 under a memory cap: largest batch, time to train and to evaluate with beams",
    "checkpoint": "saves at once and beside training, beside torch.distributed.checkpoint",
    "copies": "steps with copies of all states in memory, beside steps without",
    "patches": "steps with a log of changed weights, beside steps without; size of a patch",
    "diagnose": "ten spoilt configurations: is the cause named, and its gain right?",
    "comm_convergence": "the loss of a small GPT with quantized communication; hours",
    "differences": "lossless differences of weights: codecs, and bytes over whole runs",
    "cpu_adam_convergence": "the loss of a GPT-2 with 8- and 16-bit optimizer states",
}
MODULES = {
    "copies": "in_turn.copies",
    "differences": "differences.program",
    "patches": "in_turn.patches",
    "plan": "plan.program",
    "practicality": "schedule.practicality",
    "schedule": "schedule.program",
}

if __name__ == "__main__":
    program = "python integration/lab/run.py"
    Experiments(program, "lab.experiments", EXPERIMENTS, MODULES).run()
