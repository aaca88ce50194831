"""Writes small PyTorch programs, and the outputs that PyTorch gives for them, into a folder: `python pytorch_files.py
FOLDER`. Runs in a separate process, so that no test imports PyTorch. Next to each file is `<name>.npz`: the inputs and
outputs, by the names under which they are served."""

from __future__ import annotations

import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Tuple  # noqa: UP035, TorchScript reads them

import numpy as np
import torch
import torch_outputs
from torch import Tensor, nn
from torch.export import Dim
from torch.export.pt2_archive._package import package_pt2


class Classifier(nn.Module):
    """Maps rows of four values to three scores and the index of the best."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hidden = nn.Linear(4, 8)
        self.scores = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Dict[str, Tensor]:  # noqa: UP006
        scores = self.scores(torch.relu(self.hidden(x))).softmax(-1)
        return {"scores": scores, "best": scores.argmax(-1)}


class InPlace(nn.Module):
    """Writes into its input."""

    def forward(self, left: Tensor, right: Tensor) -> Tuple[Tensor, Tensor]:  # noqa: UP006
        left += right
        return left, left - 2 * right


class OfDict(nn.Module):
    def forward(self, inputs: Dict[str, Tensor]) -> Dict[str, Tensor]:  # noqa: UP006
        return {"sum": inputs["a"] + inputs["b"]}


class MayHave(nn.Module):
    def forward(self, x: Tensor, factor: int = 2, bias: Optional[Tensor] = None) -> Tensor:  # noqa: UP045
        return x * factor if bias is None else x * factor + bias


class Words(nn.Module):
    def forward(self, words: List[str]) -> Tuple[List[str], Tensor]:  # noqa: UP006
        return [word + "!" for word in words], torch.tensor([len(word) for word in words])


class Nested(nn.Module):
    """Takes a dict and a keyword argument, and returns what Triton's documentation calls RESULT[...]."""

    def forward(self, x: Tensor, options: dict[str, Tensor], *, bias: Tensor) -> Any:
        return x * options["scale"], {"moved": x + bias}


class Split(nn.Module):
    """Has a part on the device `meta`, which every PyTorch has."""

    def forward(self, x: Tensor) -> Any:
        return {"double": x * 2, "elsewhere": torch.ones(x.shape[1], device="meta")}


class Sparse(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.to_sparse()


class Raising(nn.Module):
    """Raises an error for negative values."""

    def forward(self, x: Tensor) -> Dict[str, Tensor]:  # noqa: UP006
        if bool(x.min() < 0):
            raise ValueError("nothing negative")
        return {"same": x, "turned": x.t(), "repeated": x[:1].expand(3, -1), "rest": x[:0], "sum": x.sum() / 0}


class Large(nn.Module):
    """Allocates as much memory as its input says."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros(int(x.sum()))


class Pair(nn.Module):
    """Takes two inputs of equal length, and a third of twice that length."""

    def forward(self, left: Tensor, right: Tensor, pairs: Tensor) -> Tensor:
        return left + right + pairs.reshape(-1, 2).sum(1)


class LookUp(nn.Module):
    """Looks rows up in a table of ten: by one position, and by a second that may be negative (counted from the end)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 64)

    def forward(self, ids: Tensor, ends: Tensor) -> Tensor:
        return self.table(ids.reshape(-1).to(torch.int64)).sum(-1) + self.table.weight[ends].sum(-1)


class Weighted(nn.Module):
    """Weights each column differently, so that swapped inputs are noticed."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.arange(4.0)


class Several(nn.Module):
    """Pairs, looks up, and adds every second value of a tensor to another one: one program for engines that compile for
    long."""

    def __init__(self) -> None:
        super().__init__()
        self.pair, self.look_up = Pair(), LookUp()

    def forward(
        self,
        left: Tensor,
        right: Tensor,
        pairs: Tensor,
        ids: Tensor,
        ends: Tensor,
        short: Tensor,
        long: Tensor,
    ) -> Any:
        return self.pair(left, right, pairs), self.look_up(ids, ends), short + long[::2]


class Named(nn.Module):
    """Has dict keys that are not identifiers, or that equal names of other tensors."""

    def forward(self, x: Tensor) -> Any:
        return {"OUTPUT__1": x + 1, "OUTPUT__0": x + 2, "": x + 3, 7: x + 4, "7": x + 5}


class Sized(nn.Module):
    """Takes and returns values that are not tensors, too."""

    def forward(self, amount: int, x: Tensor, other: Tensor | None) -> Any:
        return x.shape[0], x + amount if other is None else other, None


class Swapped(nn.Module):
    def forward(self, INPUT__1: Tensor, INPUT__0: Tensor) -> Tensor:  # noqa: N803
        return INPUT__1 - 2 * INPUT__0


class OwnSelf(nn.Module):
    """A module that torch.jit cannot restore as a module: its method names `self` differently."""

    def forward(this, self: Tensor) -> Tensor:  # noqa: N805
        return self + 1


class Corner(nn.Module):
    """Returns one element of an input, which may be larger than the memory."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:1, :1] + 1


class Half(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class Typed(nn.Module):
    """Computes in fp32 between its layers, whatever their weights are, as RMSNorm does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).to(torch.float32).pow(2))


class OnlyPositive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if bool((x <= 0).any()):
            raise ValueError("positive values only")
        return self.layer(x)


class Finding(nn.Module):
    """Returns "boxes" only where something is found, and then as the first key."""

    def forward(self, x: Tensor) -> Dict[str, Tensor]:  # noqa: UP006
        found: Dict[str, Tensor] = {}  # noqa: UP006
        if bool((x > 0).any()):
            found["boxes"] = x * 10
        found["scores"] = x + 1
        return found


class Counting(nn.Module):
    """Adds the number of its runs."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return x + self.runs


class Reordering(nn.Module):
    """Returns the same keys, in an order that depends on the values."""

    def forward(self, x: Tensor) -> Dict[str, Tensor]:  # noqa: UP006
        out: Dict[str, Tensor] = {}  # noqa: UP006
        if bool((x > 0).any()):
            out["second"] = x * 10
        out["first"] = x + 1
        out["second"] = x * 10
        return out


class Perhaps(nn.Module):
    """Returns nothing in the first place for zeros, and a dict in a list whose key may be missing."""

    def forward(self, x: Tensor) -> Tuple[Optional[Tensor], Tensor, List[Dict[str, Tensor]]]:  # noqa: UP006, UP045
        boxes: Optional[Tensor] = None  # noqa: UP045
        more: Dict[str, Tensor] = {"sum": x.sum(0, keepdim=True)}  # noqa: UP006
        if bool((x > 0).any()):
            boxes = x * 10
            more = {"top": x + 2, "sum": x.sum(0, keepdim=True)}
        return boxes, x + 1, [more]


class Two(nn.Module):
    def forward(self, x: Tensor) -> Tuple[Tensor, Tensor]:  # noqa: UP006
        return x + 1, x * 10


class Fields(NamedTuple):
    first: Tensor
    second: Tensor


class OfNamedTuple(nn.Module):
    def forward(self, x: Tensor) -> Fields:
        return Fields(x + 1, x * 10)


class Squeezing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x + 1).squeeze()


class NothingForZeros(nn.Module):
    def forward(self, x: Tensor) -> Tuple[Tensor, Tensor, Tensor]:  # noqa: UP006
        if bool((x == 0).all()):
            raise ValueError("zeros")
        return x + 1, x + 2, x + 3


class Strided(nn.Module):
    """Takes pictures of 3 x 3 at least, and halves their sides twice; returns also one value for each channel."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 2, 3, stride=2), nn.Conv2d(2, 2, 1, stride=2)

    def forward(self, x: Tensor) -> Tuple[Tensor, Tensor]:  # noqa: UP006
        found = self.second(self.first(x))
        return found, found.mean((-2, -1))


class OfClass(nn.Module):
    """Returns an instance of a class of another package."""

    def forward(self, x: Tensor) -> Any:
        return torch_outputs.Answer(hidden=x + 1, nothing=None, pooled=x.sum(1))


class OwnOperator(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.torch_outputs.twice(x)


class InTraining(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.norm(x))


class Larger(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.interpolate(x, size=(4, 6), mode="bilinear")


class Lists(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return {"none": [], "twice": x * 2, "number": 3}


class Spelled(nn.Module):
    def forward(self, x: Tensor) -> Tuple[List[str], Tensor]:  # noqa: UP006
        return [str(int(value)) for value in x], x + 1


class Stepped(nn.Module):
    """Takes lengths in steps of four."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.reshape(x.shape[0], -1, 4) * 2).reshape(x.shape)


class Encoder(nn.Module):
    """Mixes each text's states by attention: to its own elements, or, `seen_all`, also to those that the mask hides."""

    def __init__(self, seen_all: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.seen_all = seen_all
        self.words = nn.Embedding(50, 8)

    def forward(self, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
        states = self.words(ids)
        likeness = states @ states.transpose(1, 2)
        if not self.seen_all:
            likeness = likeness.masked_fill(mask[:, None, :] == 0, -1e9)
        states = likeness.softmax(-1) @ states
        weights = mask[..., None].to(states.dtype)
        return {"states": states, "mean": (states * weights).sum(1) / weights.sum(1)}


class Encoders(nn.Module):
    """An encoder of each kind in one program, for engines that compile for long."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.all = Encoder(False), Encoder(True)

    def forward(self, ids: Tensor, mask: Tensor, all_ids: Tensor, all_mask: Tensor) -> dict[str, Tensor]:
        seen = {f"all_{name}": values for name, values in self.all(all_ids, all_mask).items()}
        return {**self.own(ids, mask), **seen}


class Shares(nn.Module):
    """Divides a row by its largest element, which must not be 0."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        largest = (x.abs() * mask).amax(1, keepdim=True)
        if bool((largest == 0).any()):
            raise ValueError("nothing to share")
        return x / largest


def main(folder: Path) -> None:
    rows = Dim("rows")
    x = torch.arange(20, dtype=torch.float32).reshape(5, 4) / 10
    classifier = Classifier().eval()
    program = torch.export.export(classifier, (x,), dynamic_shapes={"x": {0: rows}})
    _save(folder, "classifier", program, {"x": x}, classifier(x))
    few = torch.export.export(classifier, (x,), dynamic_shapes={"x": {0: Dim("rows", max=8)}})
    _save(folder, "few", few, {"x": x}, classifier(x))
    fixed = torch.export.export(classifier, (x,))
    _save(folder, "fixed", fixed, {"x": x}, classifier(x))
    _save(folder, "traced", torch.jit.trace(classifier, x, strict=False), {"x": x}, classifier(x))
    texts, mask = torch.arange(1, 11).reshape(2, 5), torch.ones(2, 5, dtype=torch.int64)
    place = {0: rows, 1: Dim("length", min=2, max=40)}
    for name, seen_all in (("encoder", False), ("seeing_all", True)):
        encoder = Encoder(seen_all).eval()
        exported = torch.export.export(encoder, (texts, mask), dynamic_shapes=(place, place))
        _save(folder, name, exported, {"ids": texts, "mask": mask}, encoder(texts, mask))
    encoders, all_place = Encoders().eval(), {0: rows, 1: Dim("all_length", min=2, max=40)}
    # Not the same tensors twice, which the program would take as one.
    given = {"ids": texts, "mask": mask, "all_ids": texts.clone(), "all_mask": mask.clone()}
    exported = torch.export.export(encoders, tuple(given.values()), dynamic_shapes=(place, place, all_place, all_place))
    _save(folder, "encoders", exported, given, encoders(*given.values()))
    traced = torch.jit.trace(Encoder(False).eval(), (texts, mask), strict=False)
    _save(folder, "traced_encoder", traced, {"ids": texts, "mask": mask}, traced(texts, mask))
    torch.jit.script(Spelled()).save(folder / "spelled.pt")
    torch.jit.script(Shares()).save(folder / "shares.pt")
    steps = {"x": {0: rows, 1: 4 * Dim("quarter", max=8)}}
    _save(folder, "stepped", torch.export.export(Stepped(), (torch.ones(2, 16),), dynamic_shapes=steps), {}, {})
    typed_texts = torch.export.export(
        Typed(), (torch.ones(2, 5, 4),), dynamic_shapes={"x": {0: rows, 1: Dim("length", max=40)}}
    )
    _save(folder, "typed_texts", typed_texts, {}, {})
    bits = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    half = torch.export.export(Half(), (bits,), dynamic_shapes={"x": {0: rows}})
    _save(folder, "half", half, {"x": bits.view(torch.uint16)}, {"OUTPUT__0": (bits * 2).view(torch.uint16)})
    narrow = torch.export.export(Classifier().bfloat16().eval(), (x.bfloat16(),), dynamic_shapes={"x": {0: rows}})
    _save(folder, "narrow", narrow, {}, {})
    split = torch.export.export(Split(), (x,))
    _save(folder, "split", split, {"x": x}, {"double": x * 2})
    length = Dim("length", max=100)
    pair = torch.export.export(
        Pair(),
        (torch.ones(4), torch.ones(4), torch.ones(8)),
        dynamic_shapes=({0: length}, {0: length}, {0: 2 * length}),
    )
    _save(folder, "pair", pair, {}, {})
    ids, ends = torch.ones(5, 1, dtype=torch.int32), torch.full((5,), -10)
    look_up = torch.export.export(LookUp(), (ids, ends), dynamic_shapes=({0: rows}, {0: rows}))
    _save(folder, "look_up", look_up, {"ids": ids, "ends": ends}, {"OUTPUT__0": look_up.module()(ids, ends)})
    torch.jit.script(LookUp()).save(folder / "look_up_script.pt")
    several = Several()
    given = {"left": torch.ones(4), "right": torch.ones(4), "pairs": torch.ones(8), "ids": ids, "ends": ends}
    given |= {"short": torch.ones(3), "long": torch.ones(6)}
    shapes = ({0: length}, {0: length}, {0: 2 * length}, {0: rows}, {0: rows}, {0: Dim.AUTO}, {0: Dim.AUTO})
    exported = torch.export.export(several, tuple(given.values()), dynamic_shapes=shapes)
    _save(folder, "several", exported, given, {"OUTPUT__1": several(*given.values())[1]})
    part = torch.export.export(Weighted(), (torch.ones(5, 8)[:, :4],), dynamic_shapes={"x": {0: rows}})
    _save(folder, "part", part, {"x": x}, {"OUTPUT__0": x * torch.arange(4.0)})
    named = torch.export.export(Named(), (x,), dynamic_shapes={"x": {0: rows}})
    _save(folder, "named", named, {}, {})
    sized = torch.export.export(Sized(), (1, x, None), dynamic_shapes=(None, {0: rows}, None))
    _save(folder, "sized", sized, {"x": x}, {"OUTPUT__0": x + 1})
    _save(folder, "own_self", torch.export.export(OwnSelf(), (x,)), {}, {})
    _save(folder, "corner", torch.export.export(Corner(), (torch.zeros(1).expand(1 << 20, 1 << 20),)), {}, {})
    torch.jit.script(Swapped()).save(folder / "swapped.pt")
    torch.jit.script(Corner()).save(folder / "corner_script.pt")
    scale, bias = torch.full((5, 1), 3.0), torch.ones(5, 4)
    nested = torch.export.export(
        Nested(), (x, {"scale": scale}), {"bias": bias},
        dynamic_shapes={"x": {0: rows}, "options": {"scale": {0: rows}}, "bias": {0: rows}},
    )  # fmt: skip
    given = {"x": x, "options_scale": scale, "bias": bias}
    _save(folder, "nested", nested, given, {"OUTPUT__0": x * 3, "OUTPUT__1": x + 1})
    _save(
        folder, "in_place", torch.jit.script(InPlace()), {"left": x, "right": x}, {"0": 2 * x, "1": torch.zeros(5, 4)}
    )
    _save(folder, "of_dict", torch.jit.script(OfDict()), {"a": x, "b": x}, {"sum": 2 * x})
    _on_second_gpu(folder / "traced.pt", folder / "on_second_gpu.pt")
    torch.jit.script(Sparse()).save(folder / "sparse.pt")
    torch.jit.script(Raising()).save(folder / "raising.pt")
    torch.jit.script(Large()).save(folder / "large.pt")
    torch.jit.script(MayHave()).save(folder / "may_have.pt")
    torch.jit.script(Words()).save(folder / "words.pt")
    _save(folder, "typed", torch.export.export(Typed(), (x,), dynamic_shapes={"x": {0: rows}}), {}, {})
    torch.jit.script(Typed()).save(folder / "typed_script.pt")
    torch.jit.script(OnlyPositive()).save(folder / "only_positive.pt")
    torch.jit.script(Finding()).save(folder / "finding.pt")
    _save(folder, "counting", torch.jit.script(Counting()), {"x": x}, {"y": x + 1})
    torch.jit.script(Reordering()).save(folder / "reordering.pt")
    torch.jit.script(Perhaps()).save(folder / "perhaps.pt")
    torch.jit.script(Two()).save(folder / "two.pt")
    torch.jit.script(OfNamedTuple()).save(folder / "of_named_tuple.pt")
    torch.jit.script(Squeezing()).save(folder / "squeezing.pt")
    torch.jit.script(NothingForZeros()).save(folder / "nothing_for_zeros.pt")
    torch.jit.script(Strided()).save(folder / "strided.pt")
    of_class = torch.export.export(OfClass(), (x,), dynamic_shapes={"x": {0: rows}})
    _save(folder, "of_class", of_class, {"x": x}, {"hidden": x + 1, "pooled": x.sum(1)})
    own_operator = torch.export.export(OwnOperator(), (x,), dynamic_shapes={"x": {0: rows}})
    _save(folder, "own_operator", own_operator, {"x": x}, {"OUTPUT__0": x * 2})
    torch.jit.script(OwnOperator()).save(folder / "own_operator_script.pt")
    package_pt2(folder / "named_otherwise.pt2", exported_programs={"other": few})
    package_pt2(folder / "two_programs.pt2", exported_programs={"one": few, "other": few})
    _save(folder, "in_training", torch.export.export(InTraining().train(), (x,)), {}, {})
    _save(folder, "in_inference", torch.export.export(InTraining().eval(), (x,)), {}, {})
    small = torch.arange(6.0).reshape(1, 1, 2, 3)
    _save(folder, "larger", torch.export.export(Larger(), (small,)), {"x": small}, {"OUTPUT__0": Larger()(small)})
    lists = torch.export.export(Lists(), (x,), dynamic_shapes={"x": {0: rows}})
    _save(folder, "lists", lists, {"x": x}, {"twice": x * 2})
    torch.save(classifier.state_dict(), folder / "weights.pt")
    torch.save(classifier, folder / "pickled.pt")
    torch.save(classifier, folder / "old.pt", _use_new_zipfile_serialization=False)
    if find_spec("torchao") is not None:
        _write_quantised(folder)


def _write_quantised(folder: Path) -> None:
    """A program with tensors of torchao, and the same program without them."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    network = nn.Sequential(nn.Linear(4, 2)).eval()
    network[0].weight.data = torch.tensor([[1.0, 0, 0, 127], [0, 127, 1, 0]])
    network[0].bias.data = torch.tensor([0.5, -0.5])
    quantize_(network, Int8WeightOnlyConfig())
    exported = torch.export.export(network, (torch.ones(1, 4),))
    torch.export.save(exported, folder / "quantised.pt2")
    torch.export.save(exported.run_decompositions(), folder / "plain.pt2")


def _on_second_gpu(source: Path, target: Path) -> None:
    """The same TorchScript as if it had been saved with its weights on a second GPU."""
    with zipfile.ZipFile(source) as read, zipfile.ZipFile(target, "w") as written:
        for name in read.namelist():
            # A text in a pickle: its length, then its bytes.
            written.writestr(name, read.read(name).replace(b"\x03\0\0\0cpu", b"\x06\0\0\0cuda:1"))


def _save(folder: Path, name: str, program: Any, inputs: dict[str, Tensor], outputs: dict[str, Tensor]) -> None:
    if isinstance(program, torch.jit.ScriptModule):
        program.save(folder / f"{name}.pt")
    else:
        torch.export.save(program, folder / f"{name}.pt2")
    arrays = {f"in:{key}": value for key, value in inputs.items()}
    arrays.update((f"out:{key}", value) for key, value in outputs.items())
    np.savez(folder / f"{name}.npz", **{key: value.detach().numpy() for key, value in arrays.items()})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
