"""MIGraphX as an engine, which three backends share: onnx, migraphx and tensorflow."""

from __future__ import annotations

from rocserve.backends.base import EngineSpec

MIGRAPHX = EngineSpec(
    name="migraphx",
    module="rocserve.backends.migraphx.engine",
    # On a GPU a program's scratch memory belongs to the program: one run at a time.
    thread_safe=False,
    forks_from_zygote=False,
    needs_migraphx=True,
)
