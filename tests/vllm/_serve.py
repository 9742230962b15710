"""`vllm serve`, which alone starts several API servers for one engine. The command itself asks for
the distribution `vllm`, and on CPUs that has another name."""

from __future__ import annotations

from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    parser = FlexibleArgumentParser()
    ServeSubcommand().subparser_init(parser.add_subparsers())
    args = parser.parse_args()
    ServeSubcommand.cmd(args)
