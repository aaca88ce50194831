class TritonPythonModel:
    """Cannot be initialised."""

    def initialize(self, args):
        raise RuntimeError("broken on purpose")

    def execute(self, requests):
        return []
