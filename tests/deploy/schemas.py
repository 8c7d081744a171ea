"""JSON Schemas of the files in deploy/: the parts of Kubernetes, compose and systemd that we use.

Every object is closed, so that a word that is misspelt is found, and not silently without effect.
"""

from typing import Any

Schema = dict[str, Any]
TEXT: Schema = {"type": "string", "minLength": 1}
NUMBER: Schema = {"type": "integer", "minimum": 0}
FLAG: Schema = {"type": "boolean"}
LABELS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
NAME: Schema = {"type": "string", "pattern": "^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$", "maxLength": 63}
QUANTITY: Schema = {"type": "string", "pattern": "^[0-9]+(m|Ki|Mi|Gi|Ti)?$"}
DURATION: Schema = {"type": "string", "pattern": "^([0-9]+(ms|s|m|h))+$"}


def closed(required: Schema, **optional: Schema) -> Schema:
    """Return the schema of an object with these fields and no others."""
    return {
        "type": "object",
        "properties": {**required, **optional},
        "required": list(required),
        "additionalProperties": False,
    }


def many(item: Schema) -> Schema:
    return {"type": "array", "items": item, "minItems": 1}


def one_of(*values: object) -> Schema:
    return {"enum": list(values)}


SELECTOR = closed({"matchLabels": LABELS})
PROBE = closed(
    {"httpGet": closed({"path": {"type": "string", "pattern": "^/"}, "port": NAME})},
    periodSeconds=NUMBER,
    failureThreshold=NUMBER,
)
FROM = {
    "oneOf": [
        closed({"secretKeyRef": closed({"name": NAME, "key": TEXT})}),
        closed({"fieldRef": closed({"fieldPath": TEXT})}),
    ]
}
ENV = {"oneOf": [closed({"name": TEXT, "value": TEXT}), closed({"name": TEXT, "valueFrom": FROM})]}
CONTAINER = closed(
    {
        "name": NAME,
        "image": TEXT,
        "args": many(TEXT),
        "env": many(ENV),
        "ports": many(closed({"name": NAME, "containerPort": NUMBER})),
        "readinessProbe": PROBE,
        "resources": closed(
            {"requests": closed({"cpu": QUANTITY, "memory": QUANTITY}), "limits": closed({"memory": QUANTITY})}
        ),
        "securityContext": closed(
            {
                "allowPrivilegeEscalation": one_of(False),
                "readOnlyRootFilesystem": one_of(True),
                "capabilities": closed({"drop": one_of(["ALL"])}),
            }
        ),
        "volumeMounts": many(closed({"name": NAME, "mountPath": TEXT}, readOnly=FLAG)),
    },
    envFrom=many(closed({"configMapRef": closed({"name": NAME})})),
    startupProbe=PROBE,
    livenessProbe=PROBE,
)
POD = closed(
    {
        "metadata": closed({"labels": LABELS}, annotations=LABELS),
        "spec": closed(
            {
                "terminationGracePeriodSeconds": NUMBER,
                "securityContext": closed(
                    {
                        "runAsNonRoot": one_of(True),
                        "runAsUser": NUMBER,
                        "fsGroup": NUMBER,
                        "seccompProfile": closed({"type": one_of("RuntimeDefault")}),
                    }
                ),
                "containers": many(CONTAINER),
                "volumes": many(closed({"name": NAME}, emptyDir=closed({}), configMap=closed({"name": NAME}))),
            },
            topologySpreadConstraints=many(
                closed(
                    {
                        "maxSkew": NUMBER,
                        "topologyKey": TEXT,
                        "whenUnsatisfiable": one_of("ScheduleAnyway", "DoNotSchedule"),
                        "labelSelector": SELECTOR,
                    }
                )
            ),
        ),
    }
)
CLAIM = closed(
    {
        "metadata": closed({"name": NAME}),
        "spec": closed(
            {
                "accessModes": one_of(["ReadWriteOnce"]),
                "resources": closed({"requests": closed({"storage": QUANTITY})}),
            }
        ),
    }
)
WORK: Schema = {"replicas": NUMBER, "selector": SELECTOR, "template": POD}
META = closed({"name": NAME}, labels=LABELS)


def kind(version: str, name: str, required: Schema, **optional: Schema) -> Schema:
    head = {"apiVersion": one_of(version), "kind": one_of(name), "metadata": META}
    return closed({**head, **required}, **optional)


KINDS: dict[str, Schema] = {
    "Namespace": kind("v1", "Namespace", {}),
    "ConfigMap": kind("v1", "ConfigMap", {"data": LABELS}),
    "Secret": kind("v1", "Secret", {"type": one_of("Opaque"), "stringData": LABELS}),
    "Service": kind(
        "v1",
        "Service",
        {
            "spec": closed(
                {
                    "selector": LABELS,
                    "ports": many(closed({"name": NAME, "port": NUMBER, "targetPort": NAME})),
                },
                clusterIP=one_of("None"),
                publishNotReadyAddresses=FLAG,
                sessionAffinity=one_of("ClientIP"),
            )
        },
    ),
    "PodDisruptionBudget": kind(
        "policy/v1", "PodDisruptionBudget", {"spec": closed({"maxUnavailable": NUMBER, "selector": SELECTOR})}
    ),
    "Deployment": kind("apps/v1", "Deployment", {"spec": closed(WORK)}),
    "StatefulSet": kind(
        "apps/v1",
        "StatefulSet",
        {
            "spec": closed(
                {**WORK, "serviceName": NAME, "volumeClaimTemplates": many(CLAIM)},
                podManagementPolicy=one_of("Parallel"),
            )
        },
    ),
    "Kustomization": closed(
        {
            "apiVersion": one_of("kustomize.config.k8s.io/v1beta1"),
            "kind": one_of("Kustomization"),
            "namespace": NAME,
            "resources": many(TEXT),
            "configMapGenerator": many(closed({"name": NAME, "files": many(TEXT)})),
            "images": many(closed({"name": TEXT, "newTag": TEXT})),
        }
    ),
}

SERVICE = closed(
    {"image": TEXT, "restart": one_of("unless-stopped")},
    command=many(TEXT),
    build=closed({"context": TEXT, "dockerfile": TEXT}),
    read_only=FLAG,
    cap_drop=one_of(["ALL"]),
    security_opt=one_of(["no-new-privileges:true"]),
    environment=LABELS,
    volumes=many(TEXT),
    tmpfs=many(TEXT),
    ports=many({"type": "string", "pattern": r"^127\.0\.0\.1:[0-9]+:[0-9]+$"}),
    profiles=many(TEXT),
    depends_on={
        "type": "object",
        "additionalProperties": closed({"condition": one_of("service_healthy", "service_started")}),
    },
    healthcheck=closed({"test": many(TEXT), "interval": DURATION, "timeout": DURATION, "retries": NUMBER}),
    stop_grace_period=DURATION,
)
COMPOSE = {
    "type": "object",
    "properties": {
        "name": NAME,
        "services": {"type": "object", "additionalProperties": SERVICE},
        "volumes": {"type": "object", "additionalProperties": closed({})},
    },
    "patternProperties": {"^x-": {}},
    "required": ["name", "services", "volumes"],
    "additionalProperties": False,
}


def spelled(pattern: str) -> Schema:
    """Return the schema of a text that matches a pattern in full."""
    return {"type": "string", "pattern": f"^(?:{pattern})$"}


YES_OR_NO = one_of("yes", "no")
OCTAL = spelled("0[0-7]{3}")
WORD = spelled("[a-z][a-z0-9-]*")
DIRECTORY = spelled("(/[A-Za-z0-9._-]+)+")
UNITS = spelled(r"[a-z-]+\.(service|target)( [a-z-]+\.(service|target))*")
SECONDS = spelled("[0-9]+(ms|s|min|h)?")
UNIT = closed(
    {
        "Unit": closed(
            {"Description": TEXT, "After": UNITS}, Documentation=spelled("(file|https?|man):.+"), Wants=UNITS
        ),
        "Service": closed(
            {
                "Type": one_of("exec", "notify", "simple"),
                "ExecStart": spelled("(/[A-Za-z0-9._-]+)+( [^ ]+)*"),
                "User": WORD,
                "Group": WORD,
                "Restart": one_of("on-failure", "always"),
                "RestartSec": SECONDS,
                "TimeoutStopSec": SECONDS,
                "KillMode": one_of("control-group", "mixed", "process"),
                "Environment": spelled("[A-Z_]+=[^ ]+( [A-Z_]+=[^ ]+)*"),
            },
            EnvironmentFile=spelled("-?(/[A-Za-z0-9._-]+)+"),
            WorkingDirectory=DIRECTORY,
            StateDirectory=WORD,
            StateDirectoryMode=OCTAL,
            LimitNOFILE=spelled("[0-9]+"),
            UMask=OCTAL,
            NoNewPrivileges=YES_OR_NO,
            PrivateTmp=YES_OR_NO,
            PrivateDevices=YES_OR_NO,
            ProtectSystem=one_of("strict", "full", "yes", "no"),
            ProtectHome=one_of("yes", "no", "read-only", "tmpfs"),
            ProtectKernelTunables=YES_OR_NO,
            ProtectKernelModules=YES_OR_NO,
            ProtectControlGroups=YES_OR_NO,
            RestrictAddressFamilies=spelled("AF_[A-Z0-9]+( AF_[A-Z0-9]+)*"),
            RestrictSUIDSGID=YES_OR_NO,
            LockPersonality=YES_OR_NO,
        ),
        "Install": closed({"WantedBy": UNITS}),
    }
)
RULE = closed(
    {
        "alert": {"type": "string", "pattern": "^Purveyor[A-Za-z]+$"},
        "expr": TEXT,
        "labels": closed({"severity": one_of("critical", "warning")}),
        "annotations": closed({"summary": TEXT, "description": TEXT}),
    },
    **{"for": DURATION},
)
RULES = closed({"groups": many(closed({"name": NAME, "rules": many(RULE)}))})
