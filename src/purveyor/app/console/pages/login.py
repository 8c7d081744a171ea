"""The page before the console: plain HTML, so that it needs nothing of what is behind it."""

from html import escape

from purveyor.app.console.theme import ICON, head, static


def login_page(wanted: str, *, user: str = "", problem: str = "", fix: str = "") -> str:
    """The form; with what was wrong with the last attempt."""
    icon = "data:image/svg+xml," + ICON.replace("#", "%23").replace('"', "'")
    told = f'<div class="problem" role="alert">{escape(problem)}. {escape(fix)}.</div>' if problem else ""
    focus_user, focus_password = ("", " autofocus") if user else (" autofocus", "")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Log in · Purveyor</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="{icon}">{head()}<style>{static("login.css")}</style></head>'
        f'<body class="login"><form method="post" action="/console/login">'
        f'<div class="brand">{ICON}Purveyor</div><p>Log in as the administrator of the API.</p>{told}'
        f'<input type="hidden" name="next" value="{escape(wanted)}">'
        f'<label>User<input name="user" value="{escape(user)}" autocomplete="username" required{focus_user}></label>'
        '<label>Password<input name="password" type="password" autocomplete="current-password" required'
        f"{focus_password}></label>"
        '<button type="submit">Log in</button></form></body></html>'
    )
