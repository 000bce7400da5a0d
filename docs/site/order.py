"""The order of the pages: below each page, in groups, those that follow it. A page that is missing here is an error."""

from __future__ import annotations

Pages = dict[str, str]
"""Pages and what the site's menus call them."""

ORDER: dict[str, dict[str, Pages]] = {
    "index": {
        "": {
            "tutorials/index": "Tutorials",
            "guides": "Guides",
            "methods": "Methods",
            "evidence": "Evidence",
            "reference/index": "Reference",
            "faq": "FAQ",
            "glossary": "Glossary",
            "about": "About",
        }
    },
    "tutorials/index": {
        "": {
            "tutorials/first-run": "First run",
            "tutorials/own-data": "Your own data",
            "tutorials/own-method": "Your own method in 15 lines",
            "tutorials/paper": "A paper's experiment",
            "tutorials/to-flower": "From simulation to Flower",
        }
    },
    "guides": {
        "Decide": {
            "concepts": "Concepts",
            "choose": "Choose a strategy",
            "plan": "Which K",
            "worth": "Is asynchrony worth it?",
        },
        "Describe": {
            "worlds": "Worlds",
            "data": "Data sets and models",
            "tasks": "Any task, any client",
            "write": "Write your own",
            "examples/index": "Examples",
        },
        "Run": {
            "tune": "Tune",
            "watch": "Watch a run",
            "report": "Reports",
            "replay": "Record and replay",
            "interruptions": "Interruptions and bad uploads",
            "cluster": "From laptop to cluster",
        },
        "Protect": {
            "robustness": "Attackers and defences",
            "privacy": "Privacy",
        },
        "Deploy": {
            "flower": "On a real network",
            "examples/flower": "An app to copy",
            "fleet": "From laptop to fleet",
        },
        "Move": {
            "coming-from": "Coming from other tools",
        },
    },
    "methods": {
        "": {
            "nowcast": "Nowcast",
        }
    },
    "evidence": {
        "": {
            "league": "The league",
            "results": "The paper's results",
            "method-log": "How Nowcast was found",
            "performance": "Performance",
            "decisions": "Decisions",
        }
    },
    "reference/index": {
        "Python": {
            "reference/run": "Run",
            "reference/strategies": "Strategies",
            "reference/worlds": "Worlds",
            "reference/tasks": "Tasks and data",
            "reference/clients": "Clients",
            "reference/results": "Results and reports",
            "reference/flower": "Flower",
            "reference/errors": "Errors",
        },
        "Command line": {
            "reference/commands": "Commands",
            "configuration": "Configuration",
        },
    },
    "about": {
        "": {
            "cite": "How to cite",
            "changelog": "Changelog",
            "contributing": "Contributing",
            "security": "Security",
        }
    },
}
