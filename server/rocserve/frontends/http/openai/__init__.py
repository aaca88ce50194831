"""Models of text in the form of OpenAI's API, /v1: embeddings, the list of models, and reranking in the form that Jina,
Cohere and others share. Calls become infer requests to the same models, through the same services as all others."""
