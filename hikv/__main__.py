"""`python -m hikv`."""

import sys

from hikv.cli import main

sys.exit(main())
