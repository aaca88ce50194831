"""Serves the clients and repositories of AMD Inference Server: its configurations, requests, workers and calls.

Four modules use this package: `config/sources.py` reads configurations, `repository/version_loader.py` takes single
items, `repository/model_repository.py` holds the endpoints, and `server.py` adds its calls, whose URLs are in
`frontends/http/routes.py`.
"""
