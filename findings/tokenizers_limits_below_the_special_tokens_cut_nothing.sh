#!/usr/bin/env bash
# tokenizers 0.23.3: enable_truncation(limit) with a limit below the number of special tokens that the tokenizer adds cuts
# nothing, neither the special tokens nor the text, and says nothing. A text is then of any length. A pair has one special token
# more, so that a limit of 2, which a single text obeys, does not bind pairs. Without special tokens, all limits are obeyed.
# Seen on 2026-11-29:
#   limit 0: a text of 100 words gives 102 ids, a pair 203, without special tokens 0
#   limit 1: a text of 100 words gives 102 ids, a pair 203, without special tokens 1
#   limit 2: a text of 100 words gives 2 ids, a pair 203, without special tokens 2
#   limit 3: a text of 100 words gives 3 ids, a pair 3, without special tokens 3
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check tokenizers==0.23.3
cat >"$folder/limits.py" <<'PYTHON'
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

tokenizer = Tokenizer(WordLevel({"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "rain": 3}, unk_token="[UNK]"))
tokenizer.pre_tokenizer = Whitespace()
tokenizer.post_processor = TemplateProcessing(
    single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
)
text = " ".join(["rain"] * 100)
for limit in range(4):
    tokenizer.enable_truncation(limit)
    single, pair, plain = (
        len(one.ids)
        for one in (
            tokenizer.encode(text),
            tokenizer.encode(text, text),
            tokenizer.encode(text, add_special_tokens=False),
        )
    )
    print(f"limit {limit}: a text of 100 words gives {single} ids, a pair {pair}, without special tokens {plain}")
PYTHON
diff <("$folder/venv/bin/python" "$folder/limits.py" 2>&1) - <<'SEEN'
limit 0: a text of 100 words gives 102 ids, a pair 203, without special tokens 0
limit 1: a text of 100 words gives 102 ids, a pair 203, without special tokens 1
limit 2: a text of 100 words gives 2 ids, a pair 203, without special tokens 2
limit 3: a text of 100 words gives 3 ids, a pair 3, without special tokens 3
SEEN
