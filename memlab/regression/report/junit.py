"""A run as ``junit.xml``, the form that CI servers read."""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

from memlab.regression.report.summary_text import changes_table
from memlab.regression.summary import CaseResult, Summary

# What no XML 1.0 document may contain; an error message may quote a terminal's colour codes.
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit_xml(summary: Summary) -> str:
    """Returns a document with one test case per case: a red case without figures is an error, any other a failure."""
    counts = {
        "tests": str(len(summary.results)),
        "failures": str(sum(result.measured is not None for result in summary.red)),
        "errors": str(sum(result.measured is None for result in summary.red)),
        "skipped": "0",
        "time": f"{sum(result.seconds for result in summary.results):.1f}",
    }
    suites = ET.Element("testsuites", {"name": f"memlab nightly {summary.suite}"} | counts)
    attributes = {"name": summary.suite, "timestamp": summary.started.partition("+")[0], "hostname": summary.backend}
    suite = ET.SubElement(suites, "testsuite", attributes | counts)
    properties = ET.SubElement(suite, "properties")
    for name in ("backend", "commit", "name"):
        ET.SubElement(properties, "property", {"name": name, "value": getattr(summary, name)})
    for name, value in summary.hardware.items():
        ET.SubElement(properties, "property", {"name": f"hardware {name}", "value": value})
    for result in summary.results:
        _add(suite, summary, result)
    ET.indent(suites)
    return _NOT_XML.sub("?", f'<?xml version="1.0" encoding="UTF-8"?>\n{ET.tostring(suites, encoding="unicode")}\n')


def _add(suite: ET.Element, summary: Summary, result: CaseResult) -> None:
    attributes = {
        "classname": f"{summary.suite}.{result.lab}",
        "name": result.name,
        "time": f"{result.seconds:.1f}",
    }
    case = ET.SubElement(suite, "testcase", attributes)
    if not result.is_green:
        kind = "error" if result.measured is None else "failure"
        problem = ET.SubElement(case, kind, {"type": result.status, "message": result.message})
        problem.text = "\n".join([result.message, *changes_table(result, most=None)])
    elif result.message:
        ET.SubElement(case, "system-out").text = result.message
