"""Files for clusters by the schemas of those that read them: ``nox -s "nightly(clusters)"``.

The classes are made from Kubernetes' and Kubeflow's schemas. What they do not know they drop. No
package has the MPI operator's schema: its keys are written down here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import sky
import yaml
from kubeflow_trainer_api import models
from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError
from sky.exceptions import InvalidSkyPilotConfigError

CLUSTERS = Path(__file__).parents[1] / "examples" / "clusters"


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Replicas(_Part):
    replicas: PositiveInt = 1
    restartPolicy: Literal["Never", "OnFailure"] = "Never"
    template: dict[str, Any]


class _Roles(_Part):
    Launcher: _Replicas
    Worker: _Replicas


class _RunPolicy(_Part):
    cleanPodPolicy: Literal["None", "Running", "All"] = "Running"
    ttlSecondsAfterFinished: int = 0
    activeDeadlineSeconds: int = 0
    backoffLimit: int = 0
    schedulingPolicy: dict[str, Any] = {}
    suspend: bool = False


class _Spec(_Part):
    slotsPerWorker: PositiveInt = 1
    runPolicy: _RunPolicy
    mpiReplicaSpecs: _Roles
    sshAuthMountPath: str
    mpiImplementation: Literal["OpenMPI", "Intel", "MPICH"] = "OpenMPI"


class _MPIJob(_Part):
    apiVersion: Literal["kubeflow.org/v2beta1"]
    kind: Literal["MPIJob"]
    metadata: dict[str, str]
    spec: _Spec


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


def test_mpi_operator_knows_each_key_of_its_job() -> None:
    content = _document("mpijob.yaml")
    _MPIJob.model_validate(content)
    content["spec"]["slotPerWorker"] = 8
    with pytest.raises(ValidationError, match="slotPerWorker"):
        _MPIJob.model_validate(content)


def test_skypilot_reads_its_task_and_the_resources() -> None:
    task = sky.Task.from_yaml_config(_document("skypilot.yaml"))
    (resources,) = task.resources
    assert (task.num_nodes, resources.accelerators, resources.use_spot) == (2, {"H100": 8}, True)
    assert resources.job_recovery["strategy"] == "EAGER_NEXT_REGION"


@pytest.mark.parametrize("key", ["use_sport", "accelerator"])
def test_skypilot_refuses_a_key_of_resources_that_it_does_not_know(key: str) -> None:
    content = _document("skypilot.yaml")
    content["resources"][key] = True
    with pytest.raises(InvalidSkyPilotConfigError, match=key):
        sky.Task.from_yaml_config(content)
