"""AMD Inference Server's configuration dialects, translated to ModelConfig."""
