"""Ray Train's DeepSpeed page. Ray starts the workers; they inherit the hook from the driver."""

from cases import Case

CASES = [
    Case(
        "Ray",
        "deepspeed.initialize in TorchTrainer's workers, ZeRO-3",
        "ray_docs.py",
        ("--model={model}/bert", "--dataset={data}/pairs", "--output_dir={output}"),
        launcher=("sh", "{files}/start.sh"),
        files={"start.sh": 'exec python "$@"\n'},
        needs=("ray",),
    )
]
