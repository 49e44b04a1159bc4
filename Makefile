# make train      train the byte GPT on eight CPU processes (dp=2, pp=2, tp=2), then prove the plan equal to one device
# make check      style, types, and the quick ones of the tests that start no processes
# make test       the part of all tests that risk chooses
# make test-all   everything: facts, processes, faults, real sizes, the equality matrix; AREA=launch limits it to tests/test_launch*.py
# make campaigns  all further cases, the rest of the equality matrix, faults and random choices with hundreds of further seeds: many hours
# make bits       whether this tree trains the same bits as another one: AGAINST=REV, which is built in a worktree; twelve plans, ten steps, two precisions
# make browser    pages in a real browser, those of the site among them: installs Debian's chromium where there is none
# make docs       the documentation as a site, warnings as errors, and its tests; open build/site/index.html
# make dist       sdist and wheel in dist/, each installed into an environment of its own, the sdist without a compiler, and tried there
# make matrix     the wheel with each Python and torch that can be had here: PYTHONS="python3.11 python3.13" TORCH="2.12.1+cpu 2.13.0+cpu" pick, CUDA=1 also tries CUDA builds
# make gpu        what only a GPU can show, as JSON and a page in runs/gpu; PART="losses memory" picks, WHEELS=DIR has missing packages, SECONDS=600 lets parts take longer, DEVICE=cpu rehearses

PYTHON := .venv/bin/python
READY := .venv/.meshloom-ready
EXAMPLE := examples/01_gpt_bytes.py
PLAN := dp=2,pp=2,tp=2,microbatches=2
BOTH_CORES := --numprocesses 2 --dist worksteal
# What `make test-all` does not run.
OTHERS := not campaign and not browser and not site
AREA_FILES = $(wildcard tests/test_$(AREA)*.py)
WITH_PROCESSES = $(shell grep -l 'mark\.processes' $(AREA_FILES))
NOT_QUICK = $(shell grep -rlE --include='test_*.py' '^pytestmark = .*mark\.(processes|long|slow)' tests)
# pytest's exit status where all tests of an area start processes.
NONE := 5
# Compiled code is kept: the tests start hundreds of processes, and each would compile the package again.
unexport PYTHONDONTWRITEBYTECODE
NATIVE := setup.py $(wildcard meshloom/comm/shm/native/*)

# A machine with GPUs has a torch of its own, which stays, and often no network.
DEVICE := cuda
SECONDS := 300
GPU_PYTHON := .venv-gpu/bin/python
GPU_READY := .venv-gpu/.meshloom-ready
GPU_PACKAGES := numpy rich safetensors scipy pyzmq scikit-learn transformers pytest pytest-timeout pytest-xdist hypothesis psutil expecttest pyyaml setuptools

.PHONY: dist docs matrix train check types quick test test-all campaigns bits browser gpu
.DELETE_ON_ERROR:

train: $(READY)
	$(PYTHON) -m meshloom train $(EXAMPLE) --plan $(PLAN) --devices cpu --out runs/gpt_bytes --overwrite
	$(PYTHON) -m meshloom verify $(EXAMPLE) --plan $(PLAN) --devices cpu --quick

check: $(READY)
	$(PYTHON) -m ruff check
	$(PYTHON) -m ruff format --check
	$(MAKE) --jobs=2 --output-sync types quick

types: $(READY)
	$(PYTHON) -m pyright

# In one process, as types are checked on the other core. Files that say of all their tests that they are not quick are not read.
quick: $(READY)
	$(PYTHON) -m pytest -m "not processes and not long and not slow and $(OTHERS)" $(addprefix --ignore=,$(NOT_QUICK))

# Both halves run, whatever becomes of the first.
test: $(READY)
	ended=0; \
	$(PYTHON) -m pytest $(BOTH_CORES) -m "not processes and not slow and $(OTHERS)" || ended=$$?; \
	$(PYTHON) -m pytest $(BOTH_CORES) -m "processes and not slow and $(OTHERS)" $(WITH_PROCESSES) || ended=$$?; \
	exit $$ended

# An area may have no test of a half.
test-all: $(READY)
	$(if $(AREA),$(if $(AREA_FILES),,$(error AREA=$(AREA): there is no tests/test_$(AREA)*.py)))
	ended=0; \
	$(PYTHON) -m pytest $(BOTH_CORES) -m "not processes and $(OTHERS)" $(if $(AREA),$(AREA_FILES)) || test $$? = $(NONE) || ended=1; \
	$(if $(WITH_PROCESSES),$(PYTHON) -m pytest $(BOTH_CORES) -m "processes and $(OTHERS)" $(WITH_PROCESSES) || test $$? = $(NONE) || ended=1;) \
	exit $$ended

campaigns: $(READY)
	$(PYTHON) -m pytest -m campaign

bits: $(READY)
	$(if $(AGAINST),,$(error AGAINST=REV names the revision to compare with, like AGAINST=main))
	$(PYTHON) -m tests.bits --against $(AGAINST)

docs: $(READY)
	$(PYTHON) -m pip install --quiet --constraint constraints.txt --editable '.[dev,docs]'
	$(PYTHON) -m sphinx --fail-on-warning --keep-going --quiet --conf-dir docs/site . build/site
	$(PYTHON) -m pytest -m site

# The pages of the site are opened, too.
browser: docs
	command -v chromium >/dev/null || { apt-get update && apt-get install --yes --no-install-recommends chromium; }
	$(PYTHON) -m pip install --quiet --constraint constraints.txt --editable '.[dev,docs,browser]'
	$(PYTHON) -m pytest -m browser

# On Linux a wheel is for every distribution with glibc 2.17 (manylinux2014) or newer; auditwheel says if it uses what is younger.
for-any-linux = case $$(uname) in Linux) PATH=$(CURDIR)/.venv/bin:$$PATH $(PYTHON) -m auditwheel repair --plat manylinux_2_17_$$(uname -m) --wheel-dir $(1) $(1)/*-linux_*.whl && rm $(1)/*-linux_*.whl;; esac

# The wheel is built from the sdist, so that this has all that it takes.
dist: $(READY)
	rm -rf dist
	$(PYTHON) -m build --outdir dist
	$(call for-any-linux,dist)
	$(PYTHON) tests/installing.py dist/*.whl --compiled
	CC=/bin/false $(PYTHON) tests/installing.py dist/*.tar.gz

matrix: $(READY)
	rm -rf build/matrix
	$(PYTHON) -m build --wheel --outdir build/matrix
	$(call for-any-linux,build/matrix)
	$(PYTHON) -m tests.versions build/matrix/*.whl $(if $(PYTHONS),--pythons $(PYTHONS)) $(if $(TORCH),--torch $(TORCH)) $(if $(CUDA),--cuda)

gpu: $(if $(filter cuda,$(DEVICE)),$(GPU_READY),$(READY))
	PYTHONPATH=. $(if $(filter cuda,$(DEVICE)),$(GPU_PYTHON),$(PYTHON)) benchmarks/gpu/main.py --device $(DEVICE) --seconds $(SECONDS) --parts $(PART)

# Beside the packages of python3, torch among them; nothing is downloaded. Where python3 is itself one of an environment, 'system'
# would mean the Python below it. Without a compiler there is no transport through memory, and the part host_memory is not run.
$(GPU_READY): pyproject.toml $(NATIVE)
	python3 -m venv --system-site-packages --without-pip .venv-gpu
	python3 -c 'import site; print(*site.getsitepackages(), sep="\n")' > $$($(GPU_PYTHON) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/of_python3.pth
	python3 -m pip --python $(GPU_PYTHON) install --quiet --no-index $(if $(WHEELS),--find-links $(WHEELS)) $(GPU_PACKAGES) || \
		{ echo 'make gpu: give the missing packages: make gpu WHEELS=DIR, a folder of wheels.' >&2; exit 2; }
	$(GPU_PYTHON) setup.py --quiet build_ext --inplace
	touch $@

# The environment: made once, and again when what it is made from changes.
$(READY): pyproject.toml constraints.txt $(NATIVE)
	test -x $(PYTHON) || python3 -m venv .venv
	$(PYTHON) -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@
