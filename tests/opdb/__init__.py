"""The operator sweep: PyTorch's own operator database, every entry compared with the CPU kernels.

`python -m opdb` runs it in worker processes and writes `docs/op-coverage.md`; `test_opdb.py` runs a fixed sample of it.
"""
