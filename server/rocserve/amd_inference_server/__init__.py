"""Serves the clients and the repositories of AMD Inference Server: its configurations, requests, workers and calls.

The rest of the server meets this package in four places: `config/sources.py` reads configurations,
`repository/version_loader.py` takes single items, `repository/model_repository.py` holds the endpoints, and
`services/methods.py` lists the calls, whose URLs are in `frontends/http/routes.py`.
"""
