"""JSON Schema of the configuration, for editors and other programs.

``python -m zero_core.config.json_schema`` writes `SCHEMA_FILE` from the typed blocks. The schema
accepts the configurations of `load_config`, except for numbers and booleans of another JSON type
("2", "true", 1). It also accepts "auto" in the ``params`` of an optimizer or a schedule, which
zero-engine and Hugging Face Trainers replace. Its only rule between keys requires a batch size.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel

from zero_core.config.blocks import OPTIMIZER_PARAMS, SCHEDULER_PARAMS, Config
from zero_core.config.rules import FURTHER_KEYS
from zero_core.config.schema import SCHEMA_FILE

_Schema = dict[str, Any]


def make_schema() -> _Schema:
    schema = Config.model_json_schema()
    kinds = schema["$defs"]
    # Validators also accept one string instead of a list of strings.
    for name in ("ModulesConfig", "LeafModuleConfig"):
        for value in kinds[name]["properties"].values():
            value["type"] = ["array", "string"]
    # a validator also accepts torch's names of the two dtypes
    kinds["TorchAutocastConfig"]["properties"]["dtype"] = {"type": "string", "default": "bf16"}
    kinds["Bf16Config"]["properties"]["check_grad_overflow"] = {"type": "boolean"}
    for name in ("Optimizer", "Scheduler"):
        kinds[f"{name}Config"]["properties"]["params"] = {"$ref": f"#/$defs/{name}Params"}
    for block in (schema, *kinds.values()):
        block["properties"] = {key: _taken(value) for key, value in block["properties"].items()}
    further = {
        key: {"type": ["boolean" if isinstance(value, bool) else "object", "null"]}
        for key, value in FURTHER_KEYS.items()
    }
    kinds["OptimizerParams"] = _of_params(OPTIMIZER_PARAMS)
    kinds["SchedulerParams"] = _of_params(SCHEDULER_PARAMS)
    del schema["required"]
    size = ("train_batch_size", "train_micro_batch_size_per_gpu")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "ZeRO configuration",
        "properties": {"$schema": {"type": "string"}, **schema["properties"], **further},
        "anyOf": [{"required": [key]} for key in size],
    }


def schema_text() -> str:
    """Return the text of `SCHEMA_FILE`, with one line per key."""
    return _as_text(make_schema()) + "\n"


def _as_text(value: Any, name: str = "", indent: str = "") -> str:
    is_block = isinstance(value, dict) and "properties" in value
    if not (is_block or name in ("$defs", "properties")):
        return json.dumps(value)
    inner = indent + "  "
    lines = (f"{inner}{json.dumps(k)}: {_as_text(v, k, inner)}" for k, v in value.items())
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}"


def _taken(value: _Schema) -> _Schema:
    """Return the schema of a key: ``value``, or null for the default."""
    kind = {k: v for k, v in value.items() if k not in ("title", "description", "no effect")}
    if "no effect" in value:
        kind["description"] = f"Without effect: {value['no effect']}."
    elif "description" in value:
        kind["description"] = value["description"].replace("\n", " ")
    if "anyOf" in kind or "$ref" in kind:
        choices = kind.pop("anyOf", None) or [{"$ref": kind.pop("$ref")}]
        if isinstance(kind.get("default"), dict):
            del kind["default"]  # repeats the defaults of the block's keys
        null = {"type": "null"}
        return {"anyOf": [*(c for c in choices if c != null), null], **kind}
    if "le" in kind:  # pydantic writes "le" if a bound is set twice
        kind["maximum"] = kind.pop("le")
    if "enum" in kind:
        kind["enum"] = [*kind["enum"], None]
    types = kind["type"]
    kind["type"] = [*([types] if isinstance(types, str) else types), "null"]
    return kind


def _of_params(model: type[BaseModel]) -> _Schema:
    """Return the schema of ``params``, with "auto" as a valid value of every key."""
    params = model.model_json_schema()
    for key, value in params["properties"].items():
        choices = [{k: v for k, v in value.items() if k not in ("default", "title")}]
        if value.get("type") == "array" and "maxItems" not in value:
            choices.append(value["items"])
        params["properties"][key] = {"anyOf": [*choices, {"enum": ["auto", None]}]}
    return {**params, "title": "params"}


if __name__ == "__main__":
    SCHEMA_FILE.write_text(schema_text(), encoding="utf-8")
