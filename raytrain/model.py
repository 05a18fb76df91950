"""The network: any of torchvision's classification models, and batch norm that knows of steps."""

import difflib

import torch
import torchvision
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from raytrain import config
from raytrain.errors import ConfigError


class Classifier(nn.Module):
    """A network that takes images as they are stored.

    Args:
        body: float [N, 3, H, W] to logits [N, classes]. Its `state_dict` is what checkpoints hold.
        mean: of red, green and blue on a scale of 0 to 1, subtracted.
        std: of red, green and blue on the same scale, divided by.
    """

    shift: torch.Tensor
    scale: torch.Tensor

    def __init__(self, body: nn.Module, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__()
        self.body = body
        self.register_buffer("shift", torch.tensor(mean).mul(255).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("scale", torch.tensor(std).mul(255).reciprocal().view(1, 3, 1, 1), persistent=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits, float32 [N, classes], of images, uint8 [N, H, W, 3]."""
        pixels = images.permute(0, 3, 1, 2).float()  # NHWC in memory is torch's channels_last
        return self.body((pixels - self.shift) * self.scale).float()


def build_model(model: config.Model, data: config.Data, num_classes: int, seed: int) -> Classifier:
    """A network with weights that follow from the seed, channels_last, on the CPU.

    Raises:
        ConfigError: torchvision has no classification model of that name.
    """
    known = torchvision.models.list_models(module=torchvision.models)
    if model.name not in known:
        close = difflib.get_close_matches(model.name, known, 3)
        hint = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(known)}"
        raise ConfigError(f"model.name: torchvision has no classification model {model.name}; {hint}")
    builder = torchvision.models.get_model_builder(model.name)
    options = {
        "torchvision.models.resnet": {"zero_init_residual": model.zero_init_residual},
        "torchvision.models.vision_transformer": {"image_size": data.image_size},
        "torchvision.models.googlenet": {"aux_logits": False, "init_weights": True},
        "torchvision.models.inception": {"aux_logits": False, "init_weights": True},
    }.get(builder.__module__, {})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        body = builder(weights=None, num_classes=num_classes, **options)
    return Classifier(body.to(memory_format=torch.channels_last), data.mean, data.std)


def check_model(model: config.Model, data: config.Data, num_classes: int) -> None:
    """Runs two images through the network on the meta device, where it costs nothing.

    Raises:
        ConfigError: there is no such model, or it does not take images of this size.
    """
    with torch.device("meta"):
        images = torch.empty(2, data.image_size, data.image_size, 3, dtype=torch.uint8)
        try:
            build_model(model, data, num_classes, seed=0)(images)
        except (RuntimeError, ValueError, AssertionError) as error:
            raise ConfigError(
                f"model.name {model.name} does not take images of data.image_size {data.image_size}: {error}"
            ) from error


class StepBatchNorm:
    """Batch norm's running statistics, moved once a step by the mean over the step's micro-batches.

    Batch norm with momentum 1 leaves a micro-batch's own statistics in its buffers, here views of one vector
    `seen`. The caller sums `seen` over all micro-batches of the step, on all ranks, and calls `update`.
    """

    def __init__(self, body: nn.Module) -> None:
        layers = [m for m in body.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
        device = next(body.parameters()).device
        where = [(layer, name) for layer in layers for name in ("running_mean", "running_var")]
        buffers = [getattr(layer, name) for layer, name in where]
        momenta = [
            torch.full_like(buffer, layer.momentum or 0.0) for (layer, _), buffer in zip(where, buffers, strict=True)
        ]
        self.running = torch.cat([*buffers, torch.empty(0, device=device)])
        self.momentum = torch.cat([*momenta, torch.empty(0, device=device)])
        self.seen = self.running.clone()
        self.count = torch.zeros(len(layers), dtype=torch.int64, device=device)
        for (layer, name), view in zip(where, self.seen.split([b.numel() for b in buffers]), strict=False):
            setattr(layer, name, view)
        for layer, view in zip(layers, self.count, strict=True):
            layer.num_batches_tracked = view
            layer.momentum = 1.0

    def update(self, mean: torch.Tensor, steps: int) -> None:
        """Moves the running statistics towards the step's mean, and shows them in the layers' buffers.

        Args:
            mean: float32 [statistics], in the order of `seen`, over all the step's micro-batches.
            steps: optimizer steps taken so far; becomes num_batches_tracked.
        """
        self.running.lerp_(mean, self.momentum)
        self.seen.copy_(self.running)
        self.count.fill_(steps)

    def reload(self) -> None:
        """Takes over what a `load_state_dict` of the body has put into its buffers."""
        self.running.copy_(self.seen)
