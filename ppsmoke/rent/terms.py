"""What every machine of a run is rented with: its image, its start command, its disk; and what a model asks of one."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ppsmoke import models
from ppsmoke.errors import UsageError
from ppsmoke.rent import boot
from ppsmoke.rent.boot import TCP_PORT, UDP_PORT, create_environment, start_command
from ppsmoke.rent.create import Machine
from ppsmoke.rent.fleet import StageSpec
from ppsmoke.rent.shapes import Offer

DEFAULT_IMAGE = "python:3.12-slim"
IMAGE_BYTES = {DEFAULT_IMAGE: 46_000_000}  # compressed, as it is pulled
OTHER_IMAGE_BYTES = 600_000_000  # where nobody says
PACKAGE_BYTES = 20_000_000  # tinygrad, numpy
UNKNOWN_MODEL_BYTES = 1_000_000_000  # behind a URL that nobody has asked yet
EMBEDDING_SHARE = 0.2  # of a small model's file; its first and last stage read it
FP16_PER_FILE_BYTE = 4.0  # a 4-bit file in half precision
GPU_RAM_BESIDE_MB = 2000.0  # context, kernels, the KV cache


@dataclass(frozen=True, kw_only=True)
class Terms:
    """baked: the image holds our code, tinygrad and numpy. forbidden: secrets of the user's that must not travel.
    vast_url: where the dead-man finds the API, "" for the real one."""

    image: str = DEFAULT_IMAGE
    baked: bool = False
    disk_gb: float = 16.0
    vast_url: str = ""
    forbidden: tuple[str, ...] = field(default=(), repr=False)

    @property
    def image_bytes(self) -> int:
        return IMAGE_BYTES.get(self.image, OTHER_IMAGE_BYTES)

    def pull_s(self, offer: Offer) -> float:
        """How long its host is predicted to pull the image."""
        return self.image_bytes * 8 / (max(offer.inet_down_mbps, 1.0) * 1e6)

    def machine(self, spec: StageSpec) -> Machine:
        """What to create for a stage. Raises InputError or RentError, before anything is rented."""
        env = create_environment(
            spec,
            secret=spec.boot_secret,
            forbidden=self.forbidden,
            silence_s=boot.SILENCE_S,
            vast_url=self.vast_url,
        )
        env = {name: value for name, value in env.items() if not name.startswith("-")}
        command = start_command()
        entrypoint, args = command.onstart, command.args
        if self.baked:
            entrypoint, args = "python3", ("-m", "ppsmoke", "boot")
        ports = (f"{TCP_PORT}/tcp", f"{UDP_PORT}/udp")
        return Machine(
            image=self.image, disk_gb=self.disk_gb, env=env, ports=ports, entrypoint=entrypoint, args=tuple(args)
        )


@dataclass(frozen=True)
class Needs:
    """Of each machine, for its part of a model."""

    download_bytes: int
    gpu_ram_mb: float


def needs_of(reference: str, num_stages: int, terms: Terms) -> Needs:
    """What a stage of this model downloads and holds. Raises UsageError for a path, which rented machines cannot read,
    InputError for what is no model at all."""
    match models.resolve(reference):
        case models.Model(source=models.Wheel(bytes=wheel_bytes)) as model:
            downloaded, held = wheel_bytes, model.bytes
        case models.Model() as model:
            downloaded, held = _part(model.bytes, num_stages), model.bytes
        case models.Url():
            downloaded, held = _part(UNKNOWN_MODEL_BYTES, num_stages), UNKNOWN_MODEL_BYTES
        case Path() as path:
            raise UsageError(
                f"rented machines cannot read {path}", hint="give a name of the catalogue or an https URL with --model"
            )
    packages = 0 if terms.baked else PACKAGE_BYTES
    ram_mb = GPU_RAM_BESIDE_MB + FP16_PER_FILE_BYTE * _part(held, num_stages) / 1e6
    return Needs(terms.image_bytes + packages + downloaded, ram_mb)


def _part(size: int, num_stages: int) -> int:
    return min(size, round(size * (1 / num_stages + (EMBEDDING_SHARE if num_stages > 1 else 0.0))))
