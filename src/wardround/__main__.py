"""python -m wardround"""

from wardround.cli import main

main()
