"""add/sub as BentoML serves it; run in BentoML's environment."""

import bentoml
import numpy


@bentoml.service(workers=1, logging={"access": {"enabled": False}}, metrics={"enabled": False})
class AddSub:
    @bentoml.api(route="/add_sub")
    async def add_sub(self, INPUT0: list[list[int]], INPUT1: list[list[int]]) -> dict[str, list[list[int]]]:  # noqa: N803
        left, right = numpy.array(INPUT0, numpy.int32), numpy.array(INPUT1, numpy.int32)
        return {"OUTPUT0": (left + right).tolist(), "OUTPUT1": (left - right).tolist()}
