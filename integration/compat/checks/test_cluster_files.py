"""Files for clusters by the schemas of those that read them.

The classes are made from Kubernetes' and Kubeflow's schemas. What they do not know they drop.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from kubeflow_trainer_api import models

CLUSTERS = Path(__file__).parents[2] / "examples" / "clusters"


def _document(name: str) -> Any:
    return yaml.safe_load((CLUSTERS / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (models.TrainerV1alpha1ClusterTrainingRuntime, "kubeflow_runtime.yaml"),
        (models.TrainerV1alpha1TrainJob, "kubeflow_trainjob.yaml"),
    ],
)
def test_kubeflow_knows_each_key(kind: Any, name: str) -> None:
    content = _document(name)
    assert kind.from_dict(content).to_dict() == content


@pytest.mark.parametrize("role", ["Launcher", "Worker"])
def test_kubernetes_knows_each_key_of_the_mpi_operators_pods(role: str) -> None:
    template = _document("mpijob.yaml")["spec"]["mpiReplicaSpecs"][role]["template"]
    assert models.IoK8sApiCoreV1PodTemplateSpec.from_dict(template).to_dict() == template
