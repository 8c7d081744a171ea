"""The console: what an operator sees of Purveyor in a browser, served by the API at `/`.

`snapshot` reads the state of the system; `alerts`, `subscription_alerts` and `alert_groups` find and rank what is
wrong, `flow_graph` and `flow_svg` draw the flow (all pure); `pages` show it; `console_login` requires a login. The API
imports NiceGUI at the first login, not at its start.
"""
