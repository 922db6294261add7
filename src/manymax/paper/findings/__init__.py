"""The paper's findings 1 to 9, each with the rule that decides it from records, and the verdict.

A rule looks at every case that the runs allow, for example one data set and backbone. A case supports the finding,
opposes it, or leaves it open. The paper states its findings without exception, so the verdict is

    contradicted      if at least one case opposes
    confirmed         if none opposes, and each part of the finding has at least one case that supports it
    not enough runs   otherwise

The same rules are applied to the paper's own tables, where printed numbers are compared as they are, without a test.
"""

from manymax.paper.findings.cases import FindingCase, Verdict, verdict
from manymax.paper.findings.judgement import Judgement, judge
from manymax.paper.findings.table import FINDINGS, Finding

__all__ = ["FINDINGS", "Finding", "FindingCase", "Judgement", "Verdict", "judge", "verdict"]
