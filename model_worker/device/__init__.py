"""Devices: where the model runs, and the order of work there. Knows no model, plan or row."""

from __future__ import annotations

from model_worker.device.base import Device
from runtime.base.registry import resolve

DEVICES = {
    "cpu": "model_worker.device.cpu:CpuDevice",
    "cuda": "model_worker.device.cuda:CudaDevice",
}


def make_device(name: str, *, threaded: bool, index: int = 0) -> Device:
    """Return the device of that name. threaded: a CPU stream runs in a thread of its own (a CUDA stream is
    always asynchronous). index: which of several GPUs. Raises ConfigError for an unknown name or a device
    that this machine lacks.
    """
    device: Device = resolve("device", name, DEVICES)(threaded=threaded, index=index)
    return device
