"""amd.rocal.pipeline."""

from __future__ import annotations

import sys

import rocal_pybind as b

from amd.rocal import types


class Pipeline:
    _current_pipeline = None

    def __init__(
        self,
        batch_size=-1,
        num_threads=0,
        device_id=0,
        seed=1,
        exec_pipelined=True,
        prefetch_queue_depth=2,
        exec_async=True,
        bytes_per_sample=0,
        rocal_cpu=False,
        max_streams=-1,
        default_cuda_stream_priority=0,
        tensor_layout=types.NCHW,
        reverse_channels=False,
        mean=None,
        std=None,
        tensor_dtype=types.FLOAT,
        output_memory_type=None,
    ):
        mode = types.CPU if rocal_cpu else types.GPU
        self._handle = b.rocalCreate(batch_size, mode, device_id, num_threads, prefetch_queue_depth, tensor_dtype)
        if b.getStatus(self._handle) != types.OK:
            raise Exception("Failed creating the pipeline")
        print("Pipeline has been created succesfully")
        self._batch_size = batch_size
        b.setSeed(seed)

    def __enter__(self):
        Pipeline._current_pipeline = self
        return self

    def __exit__(self, *exception):
        pass

    def get_handle(self):
        return self._handle

    def set_outputs(self, *output_list):
        b.setOutputs(self._handle, len(output_list), output_list)

    def build(self):
        if b.rocalVerify(self._handle) != types.OK:
            print("Verify graph failed")
            sys.exit(0)
        return self

    def rocal_run(self):
        return b.rocalRun(self._handle)
