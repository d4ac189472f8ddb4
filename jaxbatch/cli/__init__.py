"""The command line: look at artifacts, check them, make them, plan runs, and run files through them.

    jaxbatch inspect embed.jbx
    jaxbatch verify embed.jbx
    jaxbatch export package.module:function --params checkpoint/ --grid "n=16:512 rows=1:64" -o embed.jbx
    jaxbatch plan --lengths lengths.txt
    jaxbatch run embed.jbx texts.jsonl -o vectors.parquet

Exit codes: 0 when all went well, 1 when it could not, 2 for a wrong command line, 3 when a run ended and some
rows have errors in the place of results.
"""

from ._main import main as main
