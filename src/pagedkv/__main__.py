"""``python -m pagedkv`` is ``pagedkv``."""

from pagedkv.cli.main import main

main()
