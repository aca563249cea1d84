"""`python -m meshllm` is the command `meshllm`."""

from meshllm.cli.main import main

main()
