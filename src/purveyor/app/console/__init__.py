"""The console: what an operator sees of Purveyor in a browser, served by the API at `/`.

`snapshot` reads the state of the system; `alerts` and `flow_graph` compute what to show (pure); `pages` show it;
`console_login` requires a login. The API imports NiceGUI at the first login, not at its start.
"""
