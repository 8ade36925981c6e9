"""`python -m qkform` is the command line."""

import sys

from qkform.cli import main

sys.exit(main())
