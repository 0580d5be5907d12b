"""Why a job waits, in plain words (the REASON column of squeue)."""

from __future__ import annotations

import re

_WORDS = {
    "None": "the scheduler has not looked at it yet",
    "Priority": "jobs with a higher priority come first",
    "Resources": "the nodes it asks for are in use",
    "Dependency": "it waits for another job",
    "DependencyNeverSatisfied": "the job that it waits for did not end as wanted: cancel it",
    "BeginTime": "its begin time has not come; after a requeue that is two minutes",
    "JobHeldUser": "you hold it: scontrol release JOB",
    "JobHeldAdmin": "an administrator holds it",
    "JobHoldMaxRequeue": "it was requeued too often and is held",
    "JobLaunchFailure": "its start failed; see the nodes' logs, or ask the site",
    "PartitionConfig": "its partition has no nodes like that: too many cores, GPUs or memory?",
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition takes no jobs now",
    "PartitionNodeLimit": "it asks for more nodes than the partition allows",
    "PartitionTimeLimit": "its time limit is above the partition's",
    "Licenses": "it waits for a licence",
    "Reservation": "its reservation has not begun",
    "ReqNodeNotAvail": "nodes that it needs are down, drained or reserved",
    "NodeDown": "a node that it needs is down",
    "BadConstraints": "no node has all that it asks for",
    "InvalidAccount": "the account is not known",
    "InvalidQOS": "the QoS is not known",
    "FrontEndDown": "no front end node is up",
    "Cleaning": "an earlier start of it is still being cleaned up",
    "Prolog": "the nodes are being prepared",
    "SystemFailure": "Slurm, the file system or the network failed; ask the site",
    "NonZeroExitCode": "it ended with an error",
    "TimeLimit": "it reached its time limit",
    "RaisedSignal": "it was ended by a signal",
    "launch failed requeued held": "its start failed and it is held: scontrol release JOB",
}
_LIMIT = re.compile(
    r"(?:(?P<whose>QOS|Assoc|Association))?(?P<kind>Max|Grp|Min)(?P<what>[A-Za-z]*?)"
    r"(?P<per>Per(?:User|Account|Job|Node)?)?(?:Limit)?"
)
_WHOSE = {"QOS": "QoS", "Assoc": "account", "Association": "account"}
_PER = {
    "PerUser": "a user's limit",
    "PerAccount": "an account's limit",
    "PerJob": "the limit for one job",
    "PerNode": "the limit for a node",
}
_WHAT = {
    "cpu": "CPUs",
    "cpus": "CPUs",
    "gres": "GPUs",
    "node": "nodes",
    "jobs": "jobs",
    "submitjobs": "submitted jobs",
    "memory": "memory",
    "mem": "memory",
    "wall": "time",
    "wallduration": "time",
    "cpuminutes": "CPU time",
    "cpurunminutes": "CPU time",
    "billing": "billing units",
    "resource": "resources",
    "group": "resources",
}


def explain(reason: str) -> str:
    """One clause; empty when Slurm gave no reason, or one that is not known here."""
    plain = reason.strip().strip("()")
    if not plain:
        return ""
    head = re.split(r"[,(:]", plain)[0].strip().replace("_", " ")
    if known := _WORDS.get(head) or _WORDS.get(head.replace(" ", "")):
        return known
    return _limit(head.replace(" ", ""))


def _limit(word: str) -> str:
    """`QOSMaxCpuPerUserLimit`, `AssocGrpGRES`, ...: which limit is reached."""
    match = _LIMIT.fullmatch(word)
    if match is None or not (match["whose"] or word.endswith("Limit")):
        return ""
    what = _WHAT.get(re.sub("(mins|minutes)$", "minutes", match["what"].lower()), match["what"])
    whose = _WHOSE.get(match["whose"] or "", "")
    place = f" of the {whose}" if whose else ""
    if match["kind"] == "Min":
        return f"it asks for less {what or 'resources'} than the limit{place} wants"
    of_all = "the limit of all its jobs" if match["kind"] == "Grp" else "the limit"
    limit = _PER.get(match["per"] or "", of_all)
    return f"{limit}{place} on {what or 'resources'} is reached"
