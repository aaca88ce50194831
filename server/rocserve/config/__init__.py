"""Reading, completing and validating model configurations; no engine and no network here."""
