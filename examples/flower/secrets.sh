#!/usr/bin/env bash
# Make what an encrypted deployment needs: a certificate authority, a server certificate, and a key for each node.
# For tests, for 30 days. In production the keys are made where they are used, and only public ones travel.
# What is there already is kept, but for the server's certificate, which is made anew with the names that are given.
set -euo pipefail

fail() {
  echo "secrets.sh: $1" >&2
  echo "usage: secrets.sh FOLDER [NODES] [NAME…], where NODES is a number and each NAME is a host name or an IP address by" \
    "which nodes reach the server" >&2
  exit 2
}

quietly() { # a command whose words are only of interest if it fails
  local words
  words=$("$@" 2>&1) || { echo "secrets.sh: $1 has failed: $words" >&2; exit 1; }
}

[ $# -ge 1 ] && [ -n "$1" ] || fail "FOLDER is missing"
folder=$1 nodes=${2:-3}
[[ $nodes =~ ^[0-9]{1,4}$ ]] || fail "NODES must be a number from 0 to 9999, got '$nodes'"
[[ $folder != -* ]] || fail "FOLDER must not begin with a hyphen, got '$folder'"
alt="DNS:localhost,IP:127.0.0.1,IP:::1"
for name in "${@:3}"; do
  if [[ $name =~ ^[0-9.]+$ ]]; then
    octet='(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])'
    [[ $name =~ ^$octet(\.$octet){3}$ ]] || fail "'$name' is not an IPv4 address"
    alt+=",IP:$name"
  elif [[ $name == *:* ]]; then
    [[ $name =~ ^[0-9A-Fa-f:]+$ ]] || fail "'$name' is not an IPv6 address; it is given without brackets and without a port"
    alt+=",IP:$name"
  else
    label='[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?'
    [[ $name =~ ^$label(\.$label)*$ ]] || fail "'$name' is neither a host name nor an IP address"
    alt+=",DNS:$name"
  fi
done
for program in openssl ssh-keygen; do command -v $program >/dev/null || fail "$program is not installed"; done

umask 077
mkdir -p "$folder"
cd "$folder"
[ -e ca.key ] && [ -e ca.crt ] || quietly openssl req -x509 -newkey rsa:3072 -nodes -days 30 \
  -subj "/CN=fedhist test authority" -addext "basicConstraints=critical,CA:TRUE" \
  -addext "keyUsage=critical,keyCertSign" -keyout ca.key -out ca.crt
quietly openssl req -newkey rsa:3072 -nodes -subj "/CN=localhost" -keyout server.key -out server.csr
printf 'subjectAltName=%s\nextendedKeyUsage=serverAuth\n' "$alt" >server.ext
quietly openssl x509 -req -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 30 -out server.crt \
  -extfile server.ext
rm -f server.csr server.ext
[ -e superexec ] || openssl rand -out superexec 48
for ((i = 0; i < 10#$nodes; i++)); do
  [ -e "node$i" ] || ssh-keygen -q -t ecdsa -b 384 -N "" -C "node$i" -f "node$i"
done
echo "ca.crt goes to every node, nodeN to node N, nodeN.pub to 'flwr supernode register', the others to the server."
