"""Serves the clients and the repositories of AMD Inference Server: its configurations, requests, workers and calls.

The rest of the server meets this package in four places: `config/sources.py` reads configurations,
`repository/version_loader.py` takes single items, `repository/model_repository.py` holds the endpoints, and
`server.py` puts its calls beside the others, whose URLs are in `frontends/http/routes.py`.
"""
