"""Facts about a text encoder from its parameters and files: its kind of answer, the making of its vectors, its limit
of tokens. A parameter of config.pbtxt takes precedence over the files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rocserve.config.pbtxt import suggest
from rocserve.config.preprocess.text_files import TextFiles
from rocserve.core.errors import ServeError, invalid_argument
from rocserve.core.printable import listed

EMBEDDING, LABEL, TOKENS, SCORE = "embedding", "label", "tokens", "score"
_MOST_TOKENS = 1 << 24
"""Tokenizers without a limit have 10^30 as their model_max_length."""


@dataclass(frozen=True, slots=True)
class TextFacts:
    """What the files and parameters of a model for texts tell about it."""

    model: str
    parameters: Mapping[str, str]
    files: TextFiles

    @property
    def output(self) -> str:
        if written := self.parameters.get("output"):
            return self._choice("output", written, (EMBEDDING, LABEL, TOKENS, SCORE))
        kind = self._architecture
        if "Pooling" in self.files.modules:
            return EMBEDDING
        if kind.endswith("ForSequenceClassification"):
            return SCORE if len(self.labels) == 1 else LABEL
        return TOKENS if kind.endswith("ForTokenClassification") else EMBEDDING

    @property
    def pooling(self) -> str:
        poolings = ("mean", "cls", "last")
        if written := self.parameters.get("pooling"):
            return self._choice("pooling", written, poolings)
        found = self.files.pooling
        named = [key for key, value in found.items() if key.startswith("pooling_mode_") and value is True]
        # Keys of 1_Pooling/config.json; later versions have "pooling_mode" with the name.
        keys = {
            "pooling_mode_mean_tokens": "mean",
            "pooling_mode_cls_token": "cls",
            "pooling_mode_lasttoken": "last",
        }
        names = {"mean": "mean", "cls": "cls", "lasttoken": "last"}
        chosen = [keys.get(key, "") for key in named] or [
            names.get(str(found[key]), "") for key in ("pooling_mode",) if key in found
        ]
        if len(chosen) > 1 or "" in chosen:
            asked = listed(named or [str(found["pooling_mode"])])
            raise self.refused(
                f"the Pooling module's config.json asks for {asked}; expected one of {', '.join(poolings)}: export the"
                " whole model, with an output sentence_embedding"
            )
        return chosen[0] if chosen else "mean"

    @property
    def normalises(self) -> bool:
        if written := self.parameters.get("normalise"):
            return self._choice("normalise", written.lower(), ("true", "false")) == "true"
        return "Normalize" in self.files.modules

    def check_modules(self) -> None:
        """Raise ServeError if modules.json has a step that neither the encoder nor its post-processing performs."""
        others = [kind for kind in self.files.modules if kind not in ("Transformer", "Pooling", "Normalize")]
        if others:
            raise self.refused(
                f"modules.json has the module {listed(others)}, whose weights are not in the encoder's file; export the"
                " whole model, with an output sentence_embedding"
            )

    @property
    def activation(self) -> str:
        """The function from the encoder's numbers to probabilities or a score: softmax, sigmoid or none."""
        if written := self.parameters.get("activation"):
            return self._choice("activation", written, ("softmax", "sigmoid", "none"))
        config = self.files.config
        if self.output != SCORE:
            several = config.get("problem_type") == "multi_label_classification" and self.output == LABEL
            return "sigmoid" if several else "softmax"
        own = config.get("sentence_transformers")
        named = own.get("activation_fn") if isinstance(own, dict) else None
        named = named or config.get("sbert_ce_default_activation_function") or "Sigmoid"
        activations = {"softmax": "softmax", "sigmoid": "sigmoid", "identity": "none", "none": "none"}
        if known := activations.get(str(named).rpartition(".")[2].lower()):
            return known
        raise self.refused(
            f"config.json asks for the activation {named}; expected Sigmoid or Identity, or the parameter 'activation'"
        )

    @property
    def max_tokens(self) -> int | None:
        """The most tokens of a text, with those that the tokenizer adds; None = unknown."""
        most = self._most_positions
        if written := self.parameters.get("max_tokens"):
            number = int(written) if written.isascii() and written.isdigit() and len(written) < 9 else 0
            if not number:
                raise self.refused(f"parameter 'max_tokens' must be a whole number of at least 1, not '{written}'")
            if most is not None and number > most:
                raise self.refused(
                    f"parameter 'max_tokens' is {number}, but the encoder has positions for {most} (config.json's"
                    " max_position_embeddings); lower the parameter"
                )
            return number
        known = (
            self._count(self.files.sentence, "max_seq_length"),
            self._count(self.files.tokenizer_config, "model_max_length"),
        )
        own = next((number for number in known if number is not None), None)
        return own if most is None else min(most, own or most)

    @property
    def vocabulary(self) -> int | None:
        """The number of rows of the encoder's table of tokens; None = unknown."""
        return self._count(self.files.config, "vocab_size")

    @property
    def padding(self) -> int | None:
        number = self.files.config.get("pad_token_id")
        return number if type(number) is int and 0 <= number < _MOST_TOKENS else None

    @property
    def prompt(self) -> str:
        """The prefix of each text."""
        if "prompt" in self.parameters:
            return self.parameters["prompt"]
        named, prompts = self.files.prompts.get("default_prompt_name"), self.files.prompts.get("prompts")
        if not isinstance(named, str) or not isinstance(prompts, dict):
            return ""
        prompt = prompts.get(named, "")
        return prompt if isinstance(prompt, str) else ""

    @property
    def lowers(self) -> bool:
        return self.files.sentence.get("do_lower_case") is True

    @property
    def width(self) -> int:
        """The number of elements of a vector; -1 = unknown."""
        known = (
            self._count(self.files.pooling, "word_embedding_dimension"),
            self._count(self.files.config, "hidden_size"),
        )
        return next((number for number in known if number is not None), -1)

    @property
    def matryoshka(self) -> str:
        """The lengths that a vector may be cut to, with commas between them, or "any"; "" = the files name none."""
        config = self.files.config
        sizes = config.get("matryoshka_dimensions")
        if isinstance(sizes, list) and sizes and all(type(size) is int and size > 0 for size in sizes):
            return ",".join(map(str, sizes))
        return "any" if config.get("is_matryoshka") is True else ""

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the classes, as transformers numbers them."""
        found = self.files.config.get("id2label")
        if found is None:
            # transformers has two labels by default.
            count = self._count(self.files.config, "num_labels") or 2
            return tuple(f"LABEL_{number}" for number in range(count))
        try:
            names = {int(number): str(name) for number, name in found.items()}
        except (AttributeError, ValueError):
            names = {}
        if not names or sorted(names) != list(range(len(names))):
            raise self.refused("config.json's id2label must have a name for each of the numbers 0, 1, 2, ...")
        # A name on several lines would be several labels.
        return tuple(names[number].replace("\n", " ") for number in range(len(names)))

    @property
    def names_labels(self) -> bool:
        return self.files.config.get("id2label") is not None

    def refused(self, text: str) -> ServeError:
        return invalid_argument(f"model '{self.model}': {text}")

    @property
    def _architecture(self) -> str:
        found = self.files.config.get("architectures")
        return str(found[0]) if isinstance(found, list) and found else ""

    @property
    def _most_positions(self) -> int | None:
        config = self.files.config
        most = self._count(config, "max_position_embeddings")
        # Architectures whose first token has the position after the padding's id: the positions before it are unused.
        behind_padding = {
            "roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "mpnet", "longformer", "roberta-prelayernorm",
        }  # fmt: skip
        if most is None or config.get("model_type") not in behind_padding:
            return most
        return max(1, most - (1 if self.padding is None else self.padding) - 1)

    def _choice(self, key: str, written: str, choices: Sequence[str]) -> str:
        if written not in choices:
            raise self.refused(
                f"parameter '{key}' must be one of {', '.join(choices)}, not '{written}'{suggest(written, choices)}"
            )
        return written

    @staticmethod
    def _count(table: Mapping[str, Any], key: str) -> int | None:
        number = table.get(key)
        return number if type(number) is int and 0 < number < _MOST_TOKENS else None
