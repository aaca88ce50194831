#!/usr/bin/env bash
# tokenizers 0.23.3: WordPieceTrainer and UnigramTrainer give the pieces other ids each time that they are trained on the same
# sentences, in one process and without dropout; neither takes a seed. BpeTrainer gives the same ids always. A tokenizer that is
# trained again from the same file therefore does not fit the text encoder that was trained with the first one.
# Seen on 2026-11-29:
#   Bpe: trained 10 times, always the same vocabulary
#   WordPiece: trained 10 times, more than one vocabulary
#   Unigram: trained 10 times, more than one vocabulary
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check tokenizers==0.23.3
cat >"$folder/train.py" <<'PYTHON'
from tokenizers import Tokenizer, models, trainers
from tokenizers.pre_tokenizers import Whitespace

SENTENCES = [
    "the river runs down to the sea",
    "rivers run and the seas rise",
    "running water wears the stones away",
    "a stone in the river is worn by water",
]
KINDS = {
    "Bpe": (models.BPE, trainers.BpeTrainer, {}),
    "WordPiece": (models.WordPiece, trainers.WordPieceTrainer, {}),
    "Unigram": (models.Unigram, trainers.UnigramTrainer, {"unk_token": "[UNK]"}),
}
for kind, (model, trainer, options) in KINDS.items():
    vocabularies = set()
    for _ in range(10):
        tokenizer = Tokenizer(model())
        tokenizer.pre_tokenizer = Whitespace()
        with_options = trainer(vocab_size=60, special_tokens=["[UNK]"], show_progress=False, **options)
        tokenizer.train_from_iterator(SENTENCES, with_options)
        vocabularies.add(frozenset(tokenizer.get_vocab().items()))
    print(f"{kind}: trained 10 times, {'always the same' if len(vocabularies) == 1 else 'more than one'} vocabulary")
PYTHON
diff <("$folder/venv/bin/python" "$folder/train.py" 2>/dev/null) - <<'SEEN'
Bpe: trained 10 times, always the same vocabulary
WordPiece: trained 10 times, more than one vocabulary
Unigram: trained 10 times, more than one vocabulary
SEEN
