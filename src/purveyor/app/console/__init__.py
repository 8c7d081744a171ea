"""The console: what an operator sees of Purveyor in a browser, served by the API at `/`.

`collector` reads a `snapshot` of the system; `alerts`, `flow_graph` and `flow_svg` compute what to show (pure); `pages`
show it; `auth_middleware` requires a login. The API imports NiceGUI at the first login, not at its start.
"""
