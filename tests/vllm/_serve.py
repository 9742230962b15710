"""`vllm serve`, which alone starts several API servers for one engine. The command itself asks for
the distribution `vllm`, and on CPUs that has another name."""

from __future__ import annotations

from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    parser = ServeSubcommand().subparser_init(FlexibleArgumentParser().add_subparsers())
    ServeSubcommand.cmd(parser.parse_args())
