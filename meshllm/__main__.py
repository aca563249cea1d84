"""`python -m meshllm` is the command `meshllm`."""

import sys

from meshllm.cli.main import main

sys.exit(main())
