#!/bin/bash
# Make the test images, without any registry, in the engine at $DOCKER_HOST. Idempotent. Run as root.
#   localhost/sandbox:py       python3, pytest, git, bash, coreutils, tar, procps (user 'sandbox' 1000:1000)
#   localhost/sandbox:busybox  busybox-static only (2 MB), for tests that need no Python
# METHOD=hostcopy (default): the files of the host's own installed Debian packages, so nothing but pytest is downloaded
# METHOD=debootstrap: a real Debian tree from the mirror of the host's apt sources (slow, large)
# IMAGE_CACHE=DIR keeps the rootfs tar between runs
set -euo pipefail
METHOD=${METHOD:-hostcopy}; IMG=${IMAGE:-localhost/sandbox}
SOCK=${DOCKER_HOST:?set DOCKER_HOST}; SOCK=${SOCK#unix://}
CACHE=${IMAGE_CACHE:-${TMPDIR:-/tmp}/container-images}; mkdir -p "$CACHE"
say() { echo "make-image: $*" >&2; }
api() { curl -sS --fail-with-body --unix-socket "$SOCK" "$@"; }
have() { [ "$(curl -s -o /dev/null -w '%{http_code}' --unix-socket "$SOCK" "http://d/v1.41/images/$1/json")" = 200 ]; }
# the import call of the API, so that no docker or podman command is needed
import() { # tar repo tag change...
  local f=$1 q="fromSrc=-&repo=$2:$3"; shift 3   # not tag=: podman 4.3 takes no notice of it
  for c in "$@"; do q+="&changes=$(python3 -c 'import sys,urllib.parse as u; print(u.quote(sys.argv[1]))' "$c")"; done
  api -X POST -H 'Content-Type: application/x-tar' -H 'Transfer-Encoding: chunked' -T "$f" "http://d/v1.41/images/create?$q" | tail -1
}
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
need=(); for c in /usr/bin/python3:python3 /usr/bin/git:git /bin/busybox:busybox-static /usr/bin/ps:procps; do [ -x "${c%%:*}" ] || need+=("${c##*:}"); done
[ "$METHOD" != debootstrap ] || command -v debootstrap >/dev/null || need+=(debootstrap)
if [ ${#need[@]} -gt 0 ]; then say "installing ${need[*]}"; apt-get update -qq >&2; DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${need[@]}" >"$CACHE/apt.log" 2>&1 || { tail "$CACHE/apt.log" >&2; exit 1; }; fi

accounts() { # root of the tree
  mkdir -p "$1"/{dev,proc,sys,run,tmp,work,root,var/tmp,etc}
  printf 'root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/bin/false\nsandbox:x:1000:1000::/work:/bin/sh\n' >"$1/etc/passwd"
  printf 'root:x:0:\ntty:x:5:\nnogroup:x:65534:\nsandbox:x:1000:\n' >"$1/etc/group"
  # /work and /tmp are 1777: older runc gives a tmpfs the mode of the folder it covers, whatever mode= says
  chmod 1777 "$1/tmp" "$1/var/tmp" "$1/work"
}

# --- busybox
if ! have "$IMG:busybox"; then
  b=$work/bb; mkdir -p "$b/bin"; cp /bin/busybox "$b/bin/busybox"
  /bin/busybox --list | grep -vx busybox | while read -r a; do ln -s busybox "$b/bin/$a"; done
  accounts "$b"; tar -C "$b" --owner=0 --group=0 --sort=name -cf "$work/bb.tar" .
  import "$work/bb.tar" "$IMG" busybox 'ENV PATH=/bin' 'WORKDIR /work' 'LABEL retrograd.test.kind=busybox' >&2
fi

# --- python
py=$(/usr/bin/python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
ver=$( { sha256sum "$0"; dpkg-query -W -f '${Package} ${Version}\n' python3."${py#3.}" git bash coreutils libc6; echo "$METHOD"; } 2>/dev/null | sha256sum | cut -c1-16)
TAR=$CACHE/rootfs-$METHOD-$ver.tar
hostcopy() {
  local r=$work/r; mkdir "$r"
  dpkg-query -W -f '${Package}\t${Pre-Depends}, ${Depends}\n' >"$work/deps"
  python3 - "$work/deps" >"$work/pkgs" <<'P'
import re, sys
SEED = "base-files bash coreutils dash libc-bin sed grep findutils tar gzip diffutils patch mawk procps util-linux python3 git ca-certificates".split()
SKIP = re.compile(r"(perl.*|libperl.*|liberror-perl|git-man|debconf|dpkg|ucf|init-system-helpers|sysvinit-utils|libpam.*|login|passwd|mount|adduser|install-info|readline-common|media-types|tzdata|openssl|base-passwd|gcc-\d+-base|libaudit.*|usrmerge|usr-is-merged)$")
deps = {}
for line in open(sys.argv[1]):
    name, d = line.rstrip("\n").split("\t", 1)
    deps.setdefault(name, d)
seen, todo = set(), list(SEED)
while todo:
    p = todo.pop()
    if p in seen or p not in deps or SKIP.match(p):
        continue
    seen.add(p)
    for group in deps[p].split(","):
        for alt in group.split("|"):
            n = re.sub(r"[:(\s].*", "", alt.strip())
            if n in deps:
                todo.append(n)
                break
print("\n".join(sorted(seen)))
P
  dpkg -L $(cat "$work/pkgs") 2>/dev/null | python3 -c '
import os, re, sys
tag = "cpython-" + sys.argv[1].replace(".", "")
top = {d: "usr/" + d for d in ("bin", "sbin", "lib", "lib32", "lib64", "libx32")}
skip = re.compile(r"usr/share/(man|doc|locale|info|lintian|bug|doc-base|menu|pixmaps|applications|bash-completion|perl5|zsh|gitweb|common-licenses|ca-certificates)(/|$)|usr/share/python3?/"
  r"|usr/lib/python3\.\d+/(test|idlelib|tkinter|turtledemo|lib2to3|ensurepip)(/|$)|etc/(cron|pam|init|security|systemd|logcheck|profile\.d)|usr/lib/systemd|var/"
  r"|usr/lib/[^/]+/(gconv|perl)/|usr/lib/git-core/git-(svn|cvs|p4|send-email|http-|imap-send|daemon|shell|instaweb|remote-http|remote-ftp)|usr/bin/(scalar|git-shell|localedef|lsblk|perl)|usr/lib/git-core/scalar")
out = set()
for line in sys.stdin:
    p = line.strip().lstrip("/")
    head, _, rest = p.partition("/")
    if head in top:
        p = top[head] + "/" + rest
    if not rest or skip.match(p) or not os.path.lexists("/" + p) or (os.path.isdir("/" + p) and not os.path.islink("/" + p)):
        continue
    out.add(p)
    if p.endswith(".py"):
        d, b = os.path.split(p)
        c = f"{d}/__pycache__/{b[:-3]}.{tag}.pyc"
        if os.path.exists("/" + c):
            out.add(c)
for p in ("usr/bin/awk", "etc/alternatives/awk", "etc/ssl/certs/ca-certificates.crt"):
    if os.path.lexists("/" + p):
        out.add(p)
sys.stdout.write("\0".join(sorted(out)))' "$py" >"$work/files"
  tar -C / --no-recursion --null -T "$work/files" -cf - | tar -C "$r" -xf -
  for d in bin sbin lib lib64; do mkdir -p "$r/usr/$d"; ln -sfn "usr/$d" "$r/$d"; done
  accounts "$r"
  printf 'passwd: files\ngroup: files\nhosts: files\n' >"$r/etc/nsswitch.conf"; echo '127.0.0.1 localhost' >"$r/etc/hosts"
  chroot "$r" /sbin/ldconfig
}
if ! have "$IMG:py" || [ "$(api "http://d/v1.41/images/$IMG:py/json" | grep -o "\"retrograd.test.version\":\"[^\"]*\"" | head -1)" != "\"retrograd.test.version\":\"$ver\"" ]; then
  if [ ! -f "$TAR" ]; then
    r=$work/r
    if [ "$METHOD" = hostcopy ]; then hostcopy
    else
      suite=$(. /etc/os-release; echo "$VERSION_CODENAME"); mirror=$(grep -rhoE '^(URIs: |deb )https?://[^ ]+' /etc/apt/sources.list /etc/apt/sources.list.d/*.sources 2>/dev/null | grep -oE 'https?://[^ ]+' | grep -m1 '/debian/*$')
      debootstrap --variant=minbase --include=python3,git,procps "$suite" "$r" "$mirror" >"$CACHE/debootstrap.log" 2>&1 || { tail "$CACHE/debootstrap.log" >&2; exit 1; }
      rm -rf "$r"/usr/share/{man,doc,locale,info} "$r"/var/cache/apt/* "$r"/var/lib/apt/lists/*
      accounts "$r"; py=$(ls "$r/usr/lib" | grep -oE '^python3\.[0-9]+' | head -1 | cut -c7-)
    fi
    site=$r/usr/local/lib/python$py/dist-packages; mkdir -p "$site"
    python3 -m pip install -q --disable-pip-version-check --no-compile --python-version "$py" --only-binary=:all: --target "$site" pytest >"$CACHE/pip.log" 2>&1 || { tail "$CACHE/pip.log" >&2; exit 1; }
    rm -rf "$site/bin"
    chroot "$r" /usr/bin/python3 -m compileall -q /usr/local/lib/python"$py"/dist-packages >&2 || true
    find "$r" -xdev -type f -perm /6000 -exec chmod ug-s {} +        # no set-user-id programs in a sandbox
    tar -C "$r" --numeric-owner --owner=0 --group=0 --sort=name -cf "$TAR.new" .; mv "$TAR.new" "$TAR"
  fi
  say "rootfs $(stat -c %s "$TAR") bytes"
  import "$TAR" "$IMG" py 'ENV PATH=/usr/local/bin:/usr/bin:/bin' 'ENV LANG=C.UTF-8' 'WORKDIR /work' 'LABEL retrograd.test.kind=python' "LABEL retrograd.test.version=$ver" 'CMD ["sleep","infinity"]' >&2
fi
echo "$IMG:py $IMG:busybox"
