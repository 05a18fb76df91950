"""What a run leaves in MLflow beside its metrics: files, learning curves and the model."""

import copy
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from raytrain.tracking.client import TrackedRun, Warn, connect, request_limits, warned
from raytrain.tracking.curves import draw_curves

if TYPE_CHECKING:
    import numpy as np
    import torch
    from mlflow.models import Model


def log_files(run: TrackedRun, files: Mapping[Path, str], warn: Warn) -> bool:
    """Store files and whole directories as artifacts of the run.

    Args:
        run: The run.
        files: From path to artifact directory, "" for the top. A directory's contents go into it.
        warn: Called once if not all could be stored.

    Returns:
        Whether all were stored.
    """
    with warned(run, "files", warn):
        client, info = connect(run)
        with request_limits(retries=1, upload=True):
            for path, artifact_directory in files.items():
                store = client.log_artifacts if path.is_dir() else client.log_artifact
                store(info.run_id, str(path), artifact_directory or None)
        return True
    return False


def log_curves(run: TrackedRun, metrics: Sequence[Mapping[str, float]], warn: Warn) -> bool:
    """Store the learning curves as `learning_curves.png`.

    Args:
        run: The run.
        metrics: Rows with `step` and the metrics of that step, ascending.
        warn: Called if they could not be stored.

    Returns:
        Whether they were stored.
    """
    with warned(run, "the learning curves", warn), tempfile.TemporaryDirectory() as folder:
        client, info = connect(run)
        path = Path(folder) / "learning_curves.png"
        draw_curves(metrics).savefig(path, dpi=130)
        with request_limits(retries=1, upload=True):
            client.log_artifact(info.run_id, str(path))
        return True
    return False


def log_model(
    run: TrackedRun,
    module: "torch.nn.Module",
    example: "np.ndarray",
    class_names: Sequence[str],
    warn: Warn,
    *,
    step: int = 0,
) -> str | None:
    """Store a model that `mlflow.pyfunc.load_model(uri).predict(images)` runs without raytrain.

    It is a graph in PyTorch's pt2 format: no pickle, no class to import, any number of images at a time.

    Args:
        run: The run that the model belongs to.
        module: From uint8 [N, H, W, 3] to float32 logits [N, C]. Left as it is, a copy on the CPU is stored.
        example: uint8 [N, H, W, 3], one image or more. They are stored with the model.
        class_names: Stored in the model's metadata, in the order of the logits.
        warn: Called if the model could not be stored.
        step: The step whose weights these are.

    Returns:
        The model's URI, or None.
    """
    with warned(run, "the model", warn), tempfile.TemporaryDirectory() as folder:
        client, info = connect(run)
        from mlflow.entities import LoggedModelOutput, LoggedModelStatus
        from mlflow.models import Model

        model = Model(run_id=run.run_id, metadata={"class_names": list(class_names), "step": step})
        path = Path(folder) / "model"
        _save_model(path, model, module, example, len(class_names))
        logged = client.create_logged_model(info.experiment_id, name="model", source_run_id=run.run_id)
        model.model_id = model.model_uuid = logged.model_id
        model.artifact_path = logged.artifact_location
        # A graph stays on the device it was exported on, while MLflow takes a GPU where there is one and then
        # refuses to load.
        model.flavors["python_function"]["config"] = {"device": "cpu"}
        model.save(str(path / "MLmodel"))
        status = LoggedModelStatus.FAILED
        try:
            with request_limits(retries=1, upload=True):
                client.log_model_artifacts(logged.model_id, str(path))
            status = LoggedModelStatus.READY
        finally:
            with request_limits(retries=1):
                client.finalize_logged_model(logged.model_id, status)
        with request_limits(retries=1):
            client.log_outputs(run.run_id, [LoggedModelOutput(logged.model_id, step)])
        return logged.model_uri
    return None


def _save_model(
    path: Path,
    model: "Model",
    module: "torch.nn.Module",
    example: "np.ndarray",
    classes: int,
) -> None:
    import mlflow
    import numpy as np
    import torch
    from mlflow.models import ModelSignature
    from mlflow.pytorch import save_model
    from mlflow.types import Schema, TensorSpec

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.export.save warns of what it does itself
        save_model(
            copy.deepcopy(module).cpu().eval(),
            str(path),
            mlflow_model=model,
            signature=ModelSignature(
                inputs=Schema([TensorSpec(np.dtype("uint8"), (-1, *example.shape[1:]))]),
                outputs=Schema([TensorSpec(np.dtype("float32"), (-1, classes))]),
            ),
            # A dimension of 1 would be exported as a constant.
            input_example=np.concatenate([example, example])[:2],
            serialization_format="pt2",
            # Without these MLflow loads the model in a new process to see what it imports.
            pip_requirements=[f"mlflow=={mlflow.__version__}", f"torch=={torch.__version__.split('+')[0]}"],
        )
