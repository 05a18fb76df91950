"""What tests share: real processes, and a small set of real images."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # bit-equality needs the same number of threads everywhere
