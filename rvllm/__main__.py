import sys

from rvllm.cli import main

sys.exit(main())
